"""What each test costs, told by the folder it is in; and which tests share a worker.

    unit     starts no SGLang engine and no server, and is quick: every folder but these
    proof    as unit, but takes minutes: laws enumerated, a GPU's half interpreted, drafts trained, files mutated (PROOFS)
    engine   tests/engine: `sglang.Engine` in the test's process, one at a time
    server   tests/server: `sglang-dspark serve` in a process of its own
    long     beside one of the four, by hand: needs the demo pair, a compiler's minutes, or an hour

`./run test` has two workers. Everything that asks the servers of tests/server/conftest.py is one group, so that each
starts once; a file of unit tests or proofs is one group, so that its fixtures are made once; all engines are one group, because a
process holds one engine at a time (tests/engine/engines.py).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

COSTS = ("unit", "proof", "engine", "server")
PROOFS = (
    "accelerator", "law", "training", "kernels/test_triton.py", "step/test_ranks_at_start.py", "test_docs.py",
    "test_hostile_files.py", "models/test_gemma4_draft.py", "commands/test_serve_errors.py",
)  # fmt: skip
TESTS = Path(__file__).parent
SHARED = {"dspark", "plain"}


def cost_of(path: Path) -> str:
    """The cost of a test file's tests."""
    inside = path.relative_to(TESTS)
    if inside.parts[0] in COSTS:
        return inside.parts[0]
    return "proof" if inside.parts[0] in PROOFS or inside.as_posix() in PROOFS else "unit"


def group_of(path: Path, fixtures: set[str]) -> str:
    """The worker group of a test file whose tests use these fixtures: one process runs all of it, in its order."""
    cost = cost_of(path)
    if cost in ("unit", "proof"):
        return path.relative_to(TESTS).with_suffix("").as_posix()
    if cost == "engine":
        return "engines"
    if "watched" in fixtures:
        return "watched"
    return "servers" if fixtures & SHARED else "own servers"


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") and find_spec(
        "torch"
    ):  # beside another worker, a second thread waits for its core
        import torch

        torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before `-m` and xdist look at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    fixtures: dict[Path, set[str]] = {}
    for item in items:
        fixtures.setdefault(item.path, set()).update(item.fixturenames)
    for item in items:
        item.add_marker(cost_of(item.path))
        item.add_marker(pytest.mark.xdist_group(group_of(item.path, fixtures[item.path])))


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """(target, draft): a tiny Llama and a draft that agrees with it often, whose confidences both exist."""
    from tests.engine.tiny import tiny_target
    from tests.engine.tiny_draft import soften_layers, tiny_draft

    folder = tmp_path_factory.mktemp("pair")
    target = soften_layers(tiny_target(folder / "target"))
    draft = tiny_draft(
        folder / "draft", target, agreeing=True, architecture="LlamaDSparkModel", enable_hidden_confidence_head=True
    )
    return target, draft
