"""Every test says what it costs, and a unit test cannot start an engine or a server without being found.

Bug class: a server test in a folder of unit tests, which makes the two-minute loop a ten-minute one; a test that `--fast`
leaves out although it starts nothing; a test that asks the shared servers from another worker and starts them twice.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict

import pytest

from tests.conftest import COSTS, PROOFS, TESTS, cost_of, group_of

STARTS = re.compile(  # what starts an engine or a server, or imports the means to
    r"\b(engine_of|sglang\.Engine)\(|(server\.live|server\.overlap|bench\.local) import|\[\*SERVE, [^]]*--verify-mode|\[COMMAND, \*"
    r"|examples/engine\.py\","
)
SHARES = re.compile(r"def \w+\([^)]*\b(dspark|plain|watched)\b")  # a test or fixture that takes a shared server
FILES = sorted(TESTS.rglob("test_*.py"))


def test_every_test_has_exactly_one_cost(request):
    for item in request.session.items:
        costs = {mark.name for mark in item.iter_markers()} & set(COSTS)
        assert len(costs) == 1, (item.nodeid, costs)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(TESTS)))
def test_a_file_starts_an_engine_or_a_server_exactly_where_its_folder_says_so(file):
    starts = STARTS.search(file.read_text()) or SHARES.search(file.read_text())
    assert bool(starts) == (cost_of(file) in ("engine", "server"))


def test_files_that_share_servers_are_one_group_and_engines_another():
    groups = {file.relative_to(TESTS).as_posix(): group_of(file) for file in FILES}
    assert {groups[f"server/{name}.py"] for name in ("test_modes", "test_equivalence", "test_law")} == {"servers"}
    assert groups["server/test_page.py"] == groups["server/test_status_and_metrics.py"] == "watched"
    assert groups["server/test_drain.py"] == "own servers" and groups["engine/test_cpu_engine.py"] == "engines"
    assert groups["law/test_laws.py"] == "law/test_laws"


def test_what_the_fast_loop_leaves_out_is_there():
    assert all((TESTS / name).exists() for name in PROOFS)


def test_one_worker_runs_all_tests_of_a_group():
    """By a real run: xdist's own way to group did nothing, in silence, under a pytest that it did not know."""
    files = ["tests/test_config.py", "tests/scheduler/test_relay.py", "tests/scheduler/test_survival_and_windows.py"]
    command = [sys.executable, "-m", "pytest", "-n", "2", "-v", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout
    workers = defaultdict(set)
    for worker, file in re.findall(r"\[(gw\d)\].* PASSED (\S+?)::", done.stdout):
        workers[file].add(worker)
    assert workers.keys() == set(files) and all(len(used) == 1 for used in workers.values()), workers
    assert len(set.union(*workers.values())) == 2
