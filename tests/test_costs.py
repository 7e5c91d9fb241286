"""Every test says what it costs, and a unit test cannot start an engine or a server without being found.

Bug class: a server test in a folder of unit tests, which makes the two-minute loop a ten-minute one; a test that `--fast`
leaves out although it starts nothing; a test that asks the shared servers from another worker and starts them twice.
"""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from tests.conftest import COSTS, TESTS, cost_of, group_of

STARTS = re.compile(  # what starts an engine or a server, or imports the means to
    r"\b(engine_of|sglang\.Engine)\(|(server\.live|bench\.local) import|\[\*SERVE, [^]]*--verify-mode|\[COMMAND, \*"
    r"|examples/engine\.py\","
)
SHARES = re.compile(r"def \w+\([^)]*\b(dspark|plain|watched)\b")  # a test or fixture that takes a shared server
FILES = sorted(TESTS.rglob("test_*.py"))


def test_every_test_has_exactly_one_cost_and_one_group(request):
    files = defaultdict(set)
    for item in request.session.items:
        costs = {mark.name for mark in item.iter_markers()} & set(COSTS)
        assert len(costs) == 1, (item.nodeid, costs)
        (group,) = item.iter_markers("xdist_group")
        files[item.path].add(group.args[0])
    assert all(len(groups) == 1 for groups in files.values())


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(TESTS)))
def test_a_file_starts_an_engine_or_a_server_exactly_where_its_folder_says_so(file):
    starts = STARTS.search(file.read_text()) or SHARES.search(file.read_text())
    assert bool(starts) == (cost_of(file) in ("engine", "server"))


def test_files_that_share_servers_are_one_group_and_engines_another():
    server, engine, unit = TESTS / "server/test_x.py", TESTS / "engine/test_x.py", TESTS / "law/test_x.py"
    assert group_of(server, {"dspark", "pair"}) == group_of(server, {"plain"}) == "servers"
    assert group_of(server, {"pair"}) == "own servers" and group_of(engine, set()) == "engines"
    assert group_of(unit, {"pair"}) == "law/test_x" and cost_of(TESTS / "test_x.py") == "unit"
