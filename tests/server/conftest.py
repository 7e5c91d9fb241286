"""The servers that tests share: one with a draft, one without, one that is watched."""

from __future__ import annotations

import pytest

from tests.server.live import start

OFFERED = ("--enable-custom-logit-processor", "--enable-cache-report")


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
        "--max-running-requests",
        "64",  # laws are drawn in thousands of short texts
        *OFFERED,
    )
    yield server
    server.kill()


@pytest.fixture(scope="session")
def plain(pair, tmp_path_factory):
    """The control: plain decoding on the same platform, no draft loaded."""
    server = start(
        tmp_path_factory.mktemp("logs") / "plain.log", "--model-path", str(pair[0]), "--verify-mode", "off", *OFFERED
    )
    yield server
    server.kill()


@pytest.fixture(scope="session")
def state(tmp_path_factory):
    """The cache folder of `watched`."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def watched(pair, state, tmp_path_factory):
    """A server with metrics, an admin key and a cache of its own; the last test of test_status_and_metrics ends it."""
    target, draft = pair
    server = start(
        tmp_path_factory.mktemp("logs") / "watched.log",
        "--model-path",
        str(target),
        "--speculative-draft-model-path",
        str(draft),
        "--enable-metrics",
        "--tool-call-parser",
        "qwen25",
        "--admin-api-key",
        "the-admin-key",
        environment={"XDG_CACHE_HOME": str(state)},
    )
    yield server
    server.kill()
