"""A sweep's order, file and arithmetic, without a server: what an interrupted or resumed sweep may say.

Bug classes: a treatment that no control follows being judged, controls of another cell or round taken for a pair, a
resumed sweep that mixes two plans or pairs a run with a control from before the interruption, a table that averages a
control into an arm. Exact on planted numbers; `benchmarks/serving.py` runs the same code on real servers.
"""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import serving
from benchmarks.sweep import LOADS, MEANS, Results, Slot, Sweep, SweepError, judged, summary
from benchmarks.sweep_report import markdown
from sglang_dspark.bench.arms import ArmError
from sglang_dspark.bench.bracket import Run
from sglang_dspark.prompts.prompts import Prompt

ARMS = ("static-1", "static-2", "compact+causal", "compact+lagged", "cap-accept")
MACHINE = {"cpu": "x", "cores": 2, "sglang": "1", "torch": "2", "sglang-dspark": "3"}
ABOUT = {"command": "c", "started": "s", "machine": MACHINE, "control": "own server", "server": {}, "prompts": "p"}


def sweep(**changes) -> Sweep:
    fields = {"control": "off", "treatments": ARMS, "temperatures": (1.0, 0.0), "concurrencies": (1, 4), "between": 2}
    return Sweep(**(fields | changes))


def run_of(slot, speed: float) -> Run:
    steps = dict.fromkeys(MEANS, 1.5) if slot.arm != "off" else None
    return Run(slot.arm, dict.fromkeys(LOADS, 10.0) | {"output_throughput": speed, "duration": 1.0}, steps, 0.0)


def filled(path, plan: Sweep, speeds: dict, count: int | None = None, *, resume: bool = False) -> Results:
    results = Results(path, plan, ABOUT, resume=resume)
    for slot in results.todo()[:count]:
        results.add(slot, run_of(slot, speeds.get(slot.arm, 100.0)))
    return results


def test_every_treatment_runs_once_in_every_cell_between_two_controls():
    slots = sweep(rounds=2).slots()
    cells = {}
    for slot in slots:
        cells.setdefault(slot.key[:3], []).append(slot.arm)
    assert len(cells) == 2 * 2 * 2 and len({slot.key for slot in slots}) == len(slots)
    for order in cells.values():
        assert sorted(arm for arm in order if arm != "off") == sorted(ARMS)
        assert [i for i, arm in enumerate(order) if arm == "off"] == [0, 3, 6, 8]
    assert len({tuple(order) for order in cells.values()}) > 1, "every cell has the same order"


def test_whole_turns_of_all_clients_fill_the_seconds_of_a_run():
    plan = sweep(seconds=8.0, output_tokens=64)
    assert [plan.requests(c, rate) for c, rate in ((1, 34.0), (4, 100.0), (8, 150.0), (16, 10.0))] == [4, 12, 16, 16]


@pytest.mark.parametrize(
    "wrong",
    [
        {"treatments": ()},
        {"treatments": ("off",)},
        {"treatments": ("a", "a")},
        {"seconds": 0},
        {"between": 0},
        {"rounds": 0},
        {"concurrencies": (0,)},
        {"output_tokens": 3},
    ],
    ids=str,
)
def test_a_sweep_that_cannot_show_anything_is_refused(wrong):
    with pytest.raises(ValueError):
        sweep(**wrong)


def planted(*runs) -> list[dict]:
    """(cell, place, arm, speed) as runs of the file."""
    return [
        {
            "round": cell,
            "temperature": 1.0,
            "concurrency": 1,
            "place": place,
            "arm": arm,
            "load": dict.fromkeys(LOADS, 1.0) | {"output_throughput": speed},
            "steps": None,
        }
        for cell, place, arm, speed in runs
    ]


def test_a_treatment_is_judged_by_the_controls_around_its_own_gap():
    runs = planted(
        (0, 0, "off", 100), (0, 1, "a", 110), (0, 2, "b", 99), (0, 3, "off", 120), (0, 4, "c", 240), (0, 5, "off", 80)
    )
    found = {one["arm"]: (one["ratio"], one["spread"]) for one in judged(runs, "off")}
    assert found == {
        "a": pytest.approx((1.0, 20 / 110)),
        "b": pytest.approx((0.9, 20 / 110)),
        "c": pytest.approx((2.4, 0.4)),
    }


def test_what_no_control_follows_is_not_judged_and_a_control_of_the_next_cell_does_not_count():
    runs = planted((0, 0, "off", 100), (0, 1, "a", 110), (1, 0, "off", 50), (1, 1, "b", 100), (1, 2, "off", 50))
    assert [(one["arm"], one["ratio"]) for one in judged(runs, "off")] == [("b", 2.0)]


def test_a_row_holds_the_mean_of_its_arm_alone_and_the_range_over_rounds():
    runs = planted(
        (0, 0, "off", 100),
        (0, 1, "a", 110),
        (0, 2, "off", 100),
        (1, 0, "off", 100),
        (1, 1, "a", 130),
        (1, 2, "off", 104),
    )
    rows = {row["arm"]: row for row in summary(runs, "off")}
    assert rows["a"]["output_throughput"] == 120 and rows["a"]["ratios"] == pytest.approx([1.1, 130 / 102])
    assert rows["off"]["runs"] == 4 and rows["off"]["spread"] == pytest.approx(4 / 101) and rows["off"]["ratios"] == []


def test_an_interrupted_sweep_leaves_its_figures_and_goes_on_with_whole_cells(tmp_path):
    path, plan, cell = tmp_path / "s.json", sweep(), 9
    filled(path, plan, {}, count=cell + 4)
    assert len(json.loads(path.read_text())["runs"]) == cell + 4
    resumed = Results(path, plan, ABOUT, resume=True)
    assert resumed.todo() == plan.slots()[cell:], "a started cell begins again, a finished one does not"
    assert len(resumed.body["runs"]) == cell
    done = filled(path, plan, {}, resume=True)
    assert done.todo() == [] and len(done.body["runs"]) == len(plan.slots())


def test_a_finished_sweep_takes_another_round_but_no_other_plan(tmp_path):
    path = tmp_path / "s.json"
    filled(path, sweep(), {})
    with pytest.raises(SweepError, match="--resume"):
        Results(path, sweep(), ABOUT, resume=False)
    with pytest.raises(SweepError, match="concurrencies"):
        Results(path, sweep(concurrencies=(1, 8)), ABOUT, resume=True)
    with pytest.raises(SweepError, match="kind of control"):
        Results(path, sweep(), ABOUT | {"control": "switched"}, resume=True)
    more = Results(path, sweep(rounds=2), ABOUT, resume=True)
    assert {slot.round for slot in more.todo()} == {1} and more.body["plan"]["rounds"] == 2


def test_another_draft_does_not_go_on_where_the_old_one_stopped(tmp_path):
    results = filled(tmp_path / "s.json", sweep(), {}, count=3)
    results.serve({}, {"draft": "a", "gamma": 5})
    results.save()
    resumed = Results(tmp_path / "s.json", sweep(), ABOUT, resume=True)
    resumed.serve({}, {"draft": "a", "gamma": 5})
    with pytest.raises(SweepError, match="another draft$"):
        resumed.serve({}, {"draft": "b", "gamma": 5})


def sources(count: int, seed: int) -> dict[str, list[Prompt]]:
    """Prompts without the packages they come from."""
    return {kind: [Prompt(kind, (("user", f"{kind} {seed} {i}"),)) for i in range(count)] for kind in serving.CLASSES}


def test_every_run_has_held_out_prompts_of_its_own_in_the_same_mixture(monkeypatch):
    monkeypatch.setattr(serving, "package_prompts", sources)
    prompts = serving.Prompts(12, seed=3)
    kinds = {prompt.messages: prompt.kind for pool in prompts.pools for prompt in pool if prompt.held_out}
    runs = [prompts.take(count, 0.5) for count in (7, 7, 4)]
    texts = [tuple((m["role"], m["content"]) for m in row["messages"]) for rows in runs for row in rows]
    assert len(set(texts)) == 18 and [kinds[text] for text in texts[:7]] == [*serving.CLASSES, *serving.CLASSES[:2]]
    assert [kinds[text] for text in texts[7:14]] == [kinds[text] for text in texts[:7]]
    assert {row["temperature"] for rows in runs for row in rows} == {0.5}


def test_the_arms_of_the_command_line_are_arms_and_those_with_a_server_of_their_own_bring_its_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["serving.py", "--also", "dflash=--verify-mode static --port 9"])
    options = serving.arguments()
    own = serving.servers_of(options)
    assert own == {"off": ["--verify-mode", "off"], "dflash": ["--verify-mode", "static", "--port", "9"]}
    assert serving.sweep_of(options, own).treatments == (*serving.ARMS, "dflash")
    monkeypatch.setattr(sys, "argv", ["serving.py", "--control", "switched", "--arm", "compakt"])
    with pytest.raises(ArmError, match="compakt"):
        serving.sweep_of(serving.arguments(), {})


class Stub:
    """Stands for a started server and for what the bench asks of it."""

    def __init__(self, url: str) -> None:
        self.url, self.stopped = url, False

    def describe(self) -> dict:
        return {"model_path": "m"}

    def status(self) -> list[dict]:
        return [{"fingerprint": {"draft": "d"}}]

    def stop(self) -> None:
        self.stopped = True


def test_the_sweep_starts_its_servers_runs_every_arm_where_it_belongs_and_stops_them(tmp_path, monkeypatch):
    started, ran = [], []

    def start(log, *arguments, **how):
        started.append(Stub(f"http://{log.stem}"))
        return started[-1]

    def run_arm(arm, server, dataset, requests, concurrency, **how):
        ran.append((arm.name, arm.url, arm.settings and arm.settings["verify_mode"], requests))
        return run_of(Slot(0, 1.0, concurrency, 0, arm.name), 100.0)

    monkeypatch.setattr(serving, "package_prompts", sources)
    monkeypatch.setattr(serving.signal, "signal", lambda *given: None)  # no handler of ours in the tests' process
    for name, stand_in in (("start", start), ("run_arm", run_arm), ("Server", Stub)):
        monkeypatch.setattr(serving, name, stand_in)
    out = tmp_path / "serving.json"
    arguments = [
        "serving.py",
        "--concurrency",
        "1,4",
        "--temperature",
        "1",
        "--arm",
        "static-2",
        "--also",
        "dflash=--x 1",
    ]
    monkeypatch.setattr(sys, "argv", [*arguments, "--out", str(out), "--seconds", "4", "--output-tokens", "20"])
    assert serving.main() == 0
    assert [server.url for server in started] == ["http://dspark", "http://off", "http://dflash"]
    assert all(server.stopped for server in started)
    cells = ran[3:]  # behind the pilot: one warm run, and the control at both loads
    assert len(cells) == 2 * 4 and {requests for *_, requests in cells} == {20}
    assert {run[:3] for run in cells} == {
        ("off", "http://off", None),
        ("static-2", None, "static"),
        ("dflash", "http://dflash", None),
    }
    assert (
        len(json.loads(out.read_text())["runs"]) == 8
        and "| dflash | 1.000 | 1.000 |" in out.with_suffix(".md").read_text()
    )
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--resume"])
    assert serving.main() == 0 and len(ran) == 11, "a finished sweep ran again"


def test_the_page_shows_gains_by_load_and_names_the_best_fixed_length(tmp_path):
    speeds = {"static-1": 110.0, "static-2": 125.0, "compact+causal": 130.0, "compact+lagged": 120.0}
    body = filled(tmp_path / "s.json", sweep(), speeds).body
    text = markdown(body)
    assert "| compact+causal | 1.300 | 1.300 |" in text and "| cap-accept | 1.000 | 1.000 |" in text
    assert (
        "- 4 clients: best fixed length static-2 (1.250); over it: compact+causal 1.040, compact+lagged 0.960" in text
    )
    assert "36 of 36 runs" in text and text.count("### T = ") == 4


def test_the_page_of_a_sweep_that_was_cut_in_its_first_gap_claims_nothing(tmp_path):
    body = filled(tmp_path / "s.json", sweep(), {"static-1": 500.0}, count=2).body
    text = markdown(body)
    assert "2 of 36 runs" in text and "5.0" not in text.split("## Every figure")[0] and "best fixed" not in text
