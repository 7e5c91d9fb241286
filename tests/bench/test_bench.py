"""A benchmark says no more than it measured: controls bracket, the bar stands before the run, and an arm is what it says.

Bug classes: a verdict from noise (controls that differ by more than the gain), a treatment that keeps a setting of the
arm before it, a plan written over another, a key in a file. Checked on planted numbers; runs against a server are in
tests/server/test_bench_runs.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from sglang_dspark import cli
from sglang_dspark.bench import receipt, traffic
from sglang_dspark.bench.arms import CLEAN, ArmError, parse_arm
from sglang_dspark.bench.bracket import BenchPlan, Cell, Run, gained, verdicts
from sglang_dspark.bench.dflash import without_sequential_head
from sglang_dspark.bench.server import Server
from sglang_dspark.settings.config import DSparkConfig


def plan(**changes) -> BenchPlan:
    fields = {
        "control": parse_arm("off"),
        "treatments": (parse_arm("compact"),),
        "classes": ("chat",),
        "concurrencies": (2,),
        "requests": 4,
    }
    return BenchPlan(**(fields | changes))


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("off", {"verify_mode": "off"}),
        ("static", {"verify_mode": "static"}),
        ("static-2", {"verify_mode": "static", "max_window": 2}),
        ("compact+lagged+token", {"verify_mode": "compact", "window_policy": "lagged", "accept_rule": "token"}),
        ("cap-accept+min-1+max-3", {"verify_mode": "cap-accept", "min_window": 1, "max_window": 3}),
    ],
)
def test_an_arm_sets_everything_so_that_nothing_of_the_one_before_it_is_left(text, settings):
    arm = parse_arm(text)
    assert arm.settings == {**CLEAN, **settings} and arm.settings_at(7) == arm.settings
    DSparkConfig.from_dict(arm.settings)


@pytest.mark.parametrize(
    "text",
    ["fast", "static-0", "compact+quick", "schedule=[]", "schedule=[[2,1,3]]", "schedule=[[1,2]]", "schedule=x", ""],
)
def test_what_is_no_arm_is_refused_with_the_way_to_write_one(text):
    with pytest.raises(ArmError, match="MODE|FROM"):
        parse_arm(text)


def test_a_schedule_gives_each_load_its_length_and_is_silent_about_no_load():
    arm = parse_arm("schedule=[[1,4,5],[5,8,3],[9,64,0]]")
    assert [arm.settings_at(c)["max_window"] for c in (1, 4, 5, 8)] == [5, 5, 3, 3]
    assert arm.settings_at(9)["verify_mode"] == "off"
    with pytest.raises(ArmError, match="65"):
        arm.settings_at(65)


def test_another_servers_arm_is_left_as_it_was_started():
    arm = parse_arm("eagle3@http://127.0.0.1:30001/")
    assert (arm.name, arm.url, arm.settings) == ("eagle3", "http://127.0.0.1:30001", None)


def cell(*rates: float) -> Cell:
    names = ["off", "compact"] * len(rates)
    return Cell("chat", 2, [Run(name, {"output_throughput": rate}, None, 0.0) for name, rate in zip(names, rates)])


@pytest.mark.parametrize(
    ("rates", "verdict"),
    [
        ((100, 110, 100), "faster"),
        ((100, 90, 100), "slower"),
        ((100, 102, 100), "undecided"),
        ((100, 98, 100), "undecided"),
        ((100, 112, 120), "undecided"),
        ((90, 104, 110), "undecided"),
        ((99, 120, 101), "faster"),
    ],
)
def test_a_gain_counts_only_above_the_bar_and_above_what_the_controls_differ(rates, verdict):
    (judged,) = verdicts(plan(bar=0.03), cell(*rates))
    assert judged["verdict"] == verdict
    assert judged["gain"] == pytest.approx(rates[1] / ((rates[0] + rates[2]) / 2) - 1)


def test_every_treatment_is_judged_by_the_controls_beside_it():
    first, second = verdicts(plan(bar=0.03), cell(100, 110, 100, 100, 80))
    assert (first["verdict"], second["spread"]) == ("faster", pytest.approx(20 / 90))


@pytest.mark.parametrize(
    "wrong", [{"requests": 1}, {"bar": 0}, {"treatments": ()}, {"output_tokens": 3}, {"concurrencies": (0,)}], ids=str
)
def test_a_plan_that_cannot_show_anything_is_refused(wrong):
    with pytest.raises(ValueError):
        plan(**wrong)


def test_the_plan_and_its_bar_are_written_before_and_never_over_another(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["x", "bench", "--api-key", "s3cret", "--admin-api-key=s3cret2"])
    written = receipt.begin(tmp_path / "r", plan(bar=0.07), {"model_path": "m"}).read_text()
    assert "7.0%" in json.loads(written)["plan"]["rule"] and "s3cret" not in written
    with pytest.raises(FileExistsError):
        receipt.begin(tmp_path / "r", plan(), {})


def test_a_receipt_names_paths_that_mean_something_on_another_machine(monkeypatch):
    info = {"model_path": str(Path.home() / "models/a"), "speculative_draft_model_path": str(Path.cwd() / "b/draft")}
    monkeypatch.setattr(Server, "_ask", lambda *args, **more: SimpleNamespace(json=lambda: {**info, "version": "1"}))
    told = Server("http://x").describe()
    assert (told["model_path"], told["speculative_draft_model_path"]) == ("~/models/a", "b/draft")
    assert told["version"] == "1" and told["dtype"] is None


def test_a_greedy_benchmark_warns_that_rules_cannot_show():
    assert any("greedy" in caution for caution in receipt.cautions(plan(temperature=0)))
    assert not any("greedy" in caution for caution in receipt.cautions(plan(temperature=1)))


def seconds(**parts) -> dict:
    return dict.fromkeys(("step", "backbone", "draft", "verify", "accept", "commit", "host"), 0.0) | parts


def rank(**counts) -> dict:
    base = {
        "steps": 0,
        "requests": 0,
        "timed_steps": 0,
        "skipped_steps": 0,
        "predicted_seconds": 0.0,
        "seconds": seconds(),
        "tokens": {"committed": 0, "verified": 0, "accepted": 0},
        "windows": [0, 0],
    }
    return base | counts


def test_step_figures_are_what_was_gained_over_all_ranks():
    before = [rank(), rank(steps=5, requests=5, windows=[5, 0])]
    spent = seconds(step=0.4, backbone=0.01, draft=0.02, verify=0.2, accept=0.03, commit=0.04, host=0.005)
    after = [
        rank(
            steps=10,
            requests=20,
            timed_steps=8,
            seconds=spent,
            tokens={"committed": 50, "verified": 40, "accepted": 30},
            windows=[0, 20],
        ),
        rank(steps=5, requests=5, windows=[5, 0]),
    ]
    steps = gained(before, after)
    assert (steps["tokens_per_step"], steps["step_ms"], steps["mean_requests"], steps["acceptance_rate"]) == (
        2.5,
        pytest.approx(50),
        2,
        0.75,
    )
    assert steps["windows"] == [0, 20]
    parts = [steps[f"{part}_ms"] for part in ("draft", "verify", "accept", "host")]
    assert parts == pytest.approx([3.0, 20.0, 7.0, 0.5])
    assert gained(None, after) is None and gained(before, before) is None


def test_traffic_is_the_same_for_the_same_seed_and_structured_requests_carry_a_schema():
    one, two, other = (traffic.traffic(["chat", "shell", "structured"], 6, seed, 0.7) for seed in (1, 1, 2))
    assert one == two != other
    assert all(row["response_format"]["type"] == "json_schema" for row in one["structured"])
    assert {row["temperature"] for rows in one.values() for row in rows} == {0.7}
    with pytest.raises(ValueError, match="poems"):
        traffic.traffic(["poems"], 2, 1, 1.0)


def test_the_dflash_arm_is_the_same_draft_without_its_sequential_head(pair, tmp_path):
    from safetensors.torch import load_file

    from sglang_dspark.models.checkpoint import check_draft_folder
    from sglang_dspark.settings.config import check_draft

    out = without_sequential_head(pair[1], tmp_path / "dflash")
    before, after = load_file(pair[1] / "model.safetensors"), load_file(out / "model.safetensors")
    assert all((before[name] == tensor).all() for name, tensor in after.items())
    assert {name.split(".")[0] for name in set(before) - set(after)} == {
        "markov_head",
        "confidence_head",
        "hidden_confidence_head",
    }
    check_draft(DSparkConfig(verify_mode="static"), check_draft_folder(out))
    with pytest.raises(ValueError, match="already"):
        without_sequential_head(out, tmp_path / "twice")


def test_answers_differ_in_length_so_that_plain_decoding_does_not_run_in_lock_step(tmp_path):
    """Of one length, all answers of a control end in one step, and speculation looks worse than users would find it."""
    traffic.save_rows([{"messages": []}] * 64, tmp_path / "rows.jsonl", 128)
    lengths = [json.loads(line)["max_tokens"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    for turn in (lengths[:8], lengths[8:16], lengths):
        assert len(set(turn)) > 7 and sum(turn) / len(turn) == pytest.approx(128, rel=0.08)
    assert 64 <= min(lengths) < 70 and 186 < max(lengths) <= 192


def test_a_server_that_is_not_there_is_one_line(tmp_path):
    result = CliRunner().invoke(cli.app, ["bench", "--url", "http://127.0.0.1:9", "--out", str(tmp_path / "r")])
    assert (
        result.exit_code == 2
        and "does not answer" in " ".join(result.output.split())
        and not Path(tmp_path / "r").exists()
    )
