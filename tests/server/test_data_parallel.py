"""Two data-parallel replicas behind one server: settings reach both, both answer, and each keeps its own state.

Bug class: a replica that a switch passed by (half of the requests then run in another mode), replicas that write one
file at once (one of them dies at the end), and a status that shows the first only.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engine.tiny import PROMPTS
from tests.server.live import start

COUNT = 2


@pytest.fixture(scope="module")
def replicas(pair, tmp_path_factory):
    target, draft = pair
    server = start(
        tmp_path_factory.mktemp("logs") / "dp.log",
        "--model-path",
        str(target),
        "--speculative-draft-model-path",
        str(draft),
        "--dp",
        str(COUNT),
    )
    yield server
    server.kill()


def answers(server) -> list[list[int]]:
    """Greedy texts of requests that arrive one by one, as users' do, so that both replicas get some."""
    with ThreadPoolExecutor(8) as pool:
        replies = pool.map(lambda prompt: server.generate(prompt, temperature=0, max_new_tokens=24)[0], PROMPTS)
        return [reply["output_ids"] for reply in replies]


def ranks(server) -> list[dict]:
    found = server.get("/dspark/status")["ranks"]
    assert [rank["rank"] for rank in found] == list(range(COUNT))
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"verify_mode": "static", "max_window": 2},
        {"verify_mode": "compact", "window_policy": "causal", "min_window": 1},
        {"verify_mode": "cap-accept", "min_window": 1},
        {"verify_mode": "off"},
    ],
    ids=lambda settings: settings["verify_mode"],
)
def test_a_switch_reaches_every_replica_and_the_text_stays(replicas, plain, settings):
    before = ranks(replicas)
    replicas.configure(**{"min_window": 0, "max_window": None, "window_policy": None} | settings)
    assert answers(replicas) == answers(plain)
    for old, new in zip(before, ranks(replicas)):
        assert settings.items() <= new["config"].items()
        assert new["steps"] > old["steps"], "a replica did nothing: the test says nothing of it"
        drafted = new["tokens"]["verified"] - old["tokens"]["verified"]
        assert (drafted == 0) == (settings["verify_mode"] == "off")


def test_a_refused_switch_changes_no_replica(replicas):
    before = [rank["config"] for rank in ranks(replicas)]
    replicas.post("/dspark/config", {"min_window": 3, "max_window": 2}, expect=400)
    assert [rank["config"] for rank in ranks(replicas)] == before


def test_replicas_end_without_an_error(replicas):
    """The last test of this file: it ends the server, whose replicas save what they learned at the same moment."""
    replicas.generate(PROMPTS[:4], temperature=0, max_new_tokens=8)
    replicas.stop()
    for fault in ("Scheduler hit an exception", "could not be saved", ".partial"):
        assert fault not in replicas.log.read_text()
