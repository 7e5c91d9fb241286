"""One server with a draft and one without, shared by all server tests of a session."""

from __future__ import annotations

import pytest

from tests.engine.tiny import tiny_target
from tests.engine.tiny_draft import soften_layers, tiny_draft
from tests.server.live import start

OFFERED = ("--enable-custom-logit-processor", "--enable-cache-report")


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """(target, draft): a tiny Llama and a draft that agrees with it often, whose confidences both exist."""
    folder = tmp_path_factory.mktemp("pair")
    target = soften_layers(tiny_target(folder / "target"))
    draft = tiny_draft(
        folder / "draft", target, agreeing=True, architecture="LlamaDSparkModel", enable_hidden_confidence_head=True
    )
    return target, draft


@pytest.fixture(scope="session")
def dspark(pair, tmp_path_factory):
    """A server that speculates; tests switch its mode through /dspark/config."""
    target, draft = pair
    server = start(
        tmp_path_factory.mktemp("logs") / "dspark.log",
        "--model-path",
        str(target),
        "--speculative-draft-model-path",
        str(draft),
        *OFFERED,
    )
    yield server
    server.stop()


@pytest.fixture(scope="session")
def plain(pair, tmp_path_factory):
    """The control: plain decoding on the same platform, no draft loaded."""
    server = start(
        tmp_path_factory.mktemp("logs") / "plain.log", "--model-path", str(pair[0]), "--verify-mode", "off", *OFFERED
    )
    yield server
    server.stop()
