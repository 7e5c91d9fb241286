"""What each test costs, told by the folder it is in; and which tests share a worker.

    unit     starts no SGLang engine and no server, and is quick: every folder but these
    proof    as unit, but takes minutes: laws enumerated, a GPU's half interpreted, drafts trained, files mutated (PROOFS)
    engine   tests/engine: `sglang.Engine` in the test's process, one at a time
    server   tests/server: `sglang-dspark serve` in a process of its own
    long     beside one of the four, by hand: needs the demo pair, a compiler's minutes, or an hour

`./run test` has two workers. Files that ask the servers of tests/server/conftest.py are one group, which one worker runs,
so that each server starts once; all engines are one group, because a process holds one engine at a time
(tests/engine/engines.py); a file of unit tests or proofs is a group of its own, so that its fixtures are made once.
"""

from __future__ import annotations

import logging
import os
import re
from functools import cache
from pathlib import Path

import pytest

COSTS = ("unit", "proof", "engine", "server")
TESTS = Path(__file__).parent
PROOFS = (
    "accelerator",
    "law",
    "training",
    "kernels/test_triton.py",
    "step/test_ranks_at_start.py",
    "test_docs.py",
    "test_hostile_files.py",
    "models/test_gemma4_draft.py",
    "commands/test_serve_errors.py",
)
# Groups in the order in which workers take them: the longest first, so that neither worker waits for the other.
FIRST = ("servers", "own servers", "watched", "engines", "kernels/test_triton")


def cost_of(path: Path) -> str:
    """The cost of a test file's tests."""
    inside = path.relative_to(TESTS)
    if inside.parts[0] in COSTS:
        return inside.parts[0]
    return "proof" if inside.parts[0] in PROOFS or inside.as_posix() in PROOFS else "unit"


@cache
def group_of(path: Path) -> str:
    """The group of a test file: one process runs all of it, in its order."""
    cost = cost_of(path)
    if cost in ("unit", "proof"):
        return path.relative_to(TESTS).with_suffix("").as_posix()
    if cost == "engine":
        return "engines"
    taken = set(
        re.findall(
            r"\b(dspark|plain|watched)\b",
            " ".join(re.findall(r"^def \w+\((.*?)\)", path.read_text(), re.MULTILINE | re.DOTALL)),
        )
    )
    if "watched" in taken:
        return "watched"
    return "servers" if taken else "own servers"


def pytest_configure(config: pytest.Config) -> None:
    # A tiny model gains nothing from a second thread, and beside other work every barrier between two costs a timeslice. Torch
    # reads this when it is imported, here and in every process that a test starts.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(cost_of(item.path))
    if hasattr(config, "workerinput"):  # workers take groups in the order of collection
        ranks = {group: rank for rank, group in enumerate(FIRST)}
        items.sort(key=lambda item: ranks.get(group_of(item.path), len(ranks)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Groups by `group_of`. (xdist's own groups are marks that it writes into node ids, which pytest 9.2 does not read.)"""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(config.rootpath / nodeid.partition("::")[0])

    config.option.loadscopereorder = False
    return ByGroup(config, log)


@pytest.fixture(autouse=True)
def logs_are_heard():
    """An engine in this process sets the level of everybody's logs; what a test reads of them must not hang on who ran
    before it."""
    logging.getLogger().setLevel(logging.WARNING)


@pytest.fixture
def three_threads():
    """Torch parts work among three threads, and so a chunk of rows in the middle of a row."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


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
