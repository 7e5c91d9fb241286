"""What a step is counted as: tries, windows, padding, confidence, predicted time; the last minutes; and Prometheus's copy.

Bug classes: a rate divided by the block size instead of by what was verified; predicted and real time of different steps;
a memory that grows; a count that reaches Prometheus twice, or under the settings of before. Numbers are planted and small
enough to count by hand.
"""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_dspark.learning.history import SLOT_SECONDS, SLOTS, History
from sglang_dspark.learning.meter import Meter
from sglang_dspark.serving.metrics import Telemetry
from sglang_dspark.serving.status import measured_survival
from sglang_dspark.settings.config import DSparkConfig


class Cost:
    """A cost model of round numbers: 1 ms a row, 10 ms of backbone, 1 ms a drafted slot."""

    model = SimpleNamespace(draft_seconds=lambda slots: 0.001 * slots)

    def step_seconds(self, requests, tokens, context):
        return 0.001 * tokens

    def backbone_seconds(self, requests, length):
        return 0.01


class HalfSure:
    """A calibration that says one half of everything, and remembers what it was taught."""

    def __init__(self) -> None:
        self.taught = []

    def conditional(self, logits, greedy):
        return np.full(logits.shape, 0.5)

    def observe(self, logits, greedy, labels, reached):
        self.taught.append((labels, reached))

    def ece(self):
        return {"sampled": [0.25, None, None]}


def speculation(**changes):
    return SimpleNamespace(
        config=DSparkConfig(),
        calibration=HalfSure(),
        cost=Cost(),
        policy_name="causal",
        windows=SimpleNamespace(drafting="depth"),
        **changes,
    )


def one_step(
    meter: Meter,
    windows: list[int],
    lengths: list[int],
    owner,
    *,
    drafts: int = 3,
    rows: int | None = None,
    confident: bool = True,
) -> None:
    """A step of `windows` and committed `lengths`, of blocks of `drafts`, whose forward ran `rows` rows."""
    step = SimpleNamespace(size=len(windows), context=10 * len(windows), greedy=np.zeros(len(windows), bool))
    ragged = SimpleNamespace(windows=torch.tensor(windows), block_size=drafts, rows=rows or sum(windows) + len(windows))
    committed = SimpleNamespace(lengths=torch.tensor(lengths), acceptance=torch.full((len(windows), drafts), torch.nan))
    drafted = SimpleNamespace(logits=np.zeros((len(windows), drafts)) if confident else None)
    meter.begin()
    meter.planned(SimpleNamespace(tokens=sum(windows), step_seconds=0.0, draft_length=drafts))
    for part in ("backbone", "draft", "verify"):
        meter.mark(part)
    meter.end(step, drafted if drafts else None, ragged, ragged, committed, owner)


def test_a_draft_outside_its_window_or_behind_a_refused_one_is_no_try():
    meter = Meter(3)
    one_step(meter, [3, 1, 0], [2, 2, 1], speculation())
    totals = meter.totals
    # request 0: draft 1 accepted, draft 2 refused, draft 3 never judged; request 1: its one draft accepted; request 2: none
    assert totals.verified_at.tolist() == [2, 1, 0]
    assert totals.accepted_at.tolist() == [2, 0, 0]
    assert (totals.offered, totals.verified, totals.accepted, totals.committed) == (9, 4, 2, 5)
    assert totals.windows.tolist() == [1, 1, 0, 1]


def test_padding_is_rows_that_no_request_owns():
    meter = Meter(3)
    one_step(meter, [2, 1], [1, 1], speculation(), rows=8)
    assert (meter.totals.rows, meter.totals.padding) == (8, 3)


def test_whole_blocks_are_counted_as_rows_where_they_are_verified_but_judged_by_windows():
    meter, owner = Meter(3), speculation()
    judged = SimpleNamespace(windows=torch.tensor([1, 0]), block_size=3, rows=3)
    verified = SimpleNamespace(windows=torch.tensor([3, 3]), block_size=3, rows=9)  # 2 anchors, 6 drafts, 1 of padding
    step = SimpleNamespace(size=2, context=20, greedy=np.zeros(2, bool))
    committed = SimpleNamespace(lengths=torch.tensor([2, 1]), acceptance=torch.full((2, 3), torch.nan))
    meter.begin()
    meter.planned(SimpleNamespace(tokens=1, draft_length=3))
    meter.end(step, SimpleNamespace(logits=None), judged, verified, committed, owner)
    assert (meter.totals.rows, meter.totals.padding, meter.totals.verified) == (9, 1, 1)


def test_confidence_is_compared_where_it_was_computed_and_only_there():
    meter, owner = Meter(3), speculation()
    one_step(meter, [3, 1], [2, 2], owner)
    one_step(meter, [3, 3], [4, 4], owner, confident=False)
    totals = meter.totals
    assert totals.confident_at.tolist() == [2, 1, 0]
    assert totals.predicted_at.tolist() == [1.0, 0.5, 0.0]
    assert totals.outcome_at.tolist() == [2.0, 0.0, 0.0]
    assert len(owner.calibration.taught) == 1


def test_predicted_and_real_seconds_are_of_the_same_steps():
    meter, owner = Meter(3), speculation()
    one_step(meter, [2, 2], [1, 1], owner)  # 6 rows, 6 slots of depth 3
    observation = meter.finish(time.perf_counter())
    assert meter.totals.predicted == pytest.approx(0.006 + 0.006 + 0.010)
    assert meter.totals.seconds["step"] == observation["seconds"] and meter.totals.timed == 1
    one_step(meter, [2, 2], [1, 1], owner)
    meter.interrupted()  # a prefill: nobody knows how long that step took
    assert meter.finish(time.perf_counter()) is None
    assert meter.totals.timed == 1 and meter.totals.predicted == pytest.approx(0.022)


def test_survival_is_the_product_of_the_conditional_rates_where_windows_hide_the_rest():
    totals = SimpleNamespace(verified_at=np.array([100, 10, 0]), accepted_at=np.array([80, 5, 0]))
    assert measured_survival(totals).tolist() == pytest.approx(
        [0.8, 0.4, 0.2]
    )  # an untried position takes the last rate
    nothing = SimpleNamespace(verified_at=np.zeros(2, int), accepted_at=np.zeros(2, int))
    assert np.isnan(measured_survival(nothing)).all()


def test_the_history_is_bounded_and_forgets_what_is_older():
    now = [1_000_000.0]
    history = History(2, clock=lambda: now[0])
    for _ in range(3 * SLOTS):
        history.add(4, 9, False, np.array([1, 1, 2]))
        history.time(0.02, 0.01, 4, 9)
        now[0] += SLOT_SECONDS
    rows = history.by_time()
    assert len(rows) <= SLOTS and all(row["steps"] == 1 and row["windows"] == [1, 1, 2] for row in rows)
    assert [row["at"] for row in rows] == sorted(row["at"] for row in rows)
    now[0] += 10 * SLOTS * SLOT_SECONDS
    assert history.by_time() == []


def test_load_classes_are_powers_of_two_and_start_anew_with_the_settings():
    history = History(1)
    for requests in (1, 2, 3, 4, 5, 8, 9, 5000):
        history.add(requests, requests, False, np.array([requests, 0]))
    assert [(row["up_to"], row["steps"]) for row in history.by_load()] == [
        (1, 1),
        (2, 1),
        (4, 2),
        (8, 2),
        (16, 1),
        (2048, 1),
    ]
    history.settings(DSparkConfig())
    assert history.by_load() == []


def scraped(registry, name: str) -> dict[tuple, float]:
    """Samples of one metric by the values of its own labels."""
    common = ("model_name", "dp_rank")
    return {
        tuple(v for k, v in sample.labels.items() if k not in common): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def test_metrics_carry_the_totals_once_however_often_they_are_copied():
    from prometheus_client import CollectorRegistry

    registry, meter, owner = CollectorRegistry(), Meter(3), speculation()
    telemetry = Telemetry(meter, owner, {"model_name": "m", "dp_rank": "0"}, registry)
    one_step(meter, [3, 1, 0], [2, 2, 1], owner)
    meter.finish(time.perf_counter())
    telemetry.flush()
    telemetry.flush()
    assert scraped(registry, "dspark_tokens_committed_total") == {(): 5}
    assert scraped(registry, "dspark_windows_total") == {("0",): 1, ("1",): 1, ("2",): 0, ("3",): 1}
    assert scraped(registry, "dspark_position_tried_total") == {("1",): 2, ("2",): 1, ("3",): 0}
    assert scraped(registry, "dspark_step_seconds_count") == {(): 1}
    assert scraped(registry, "dspark_calibration_error") == {("1", "sampled"): 0.25}
    one_step(meter, [3, 1, 0], [2, 2, 1], owner)
    telemetry.flush()
    assert scraped(registry, "dspark_tokens_committed_total") == {(): 10}


def test_the_settings_in_force_are_the_only_ones_that_read_1():
    from prometheus_client import CollectorRegistry

    registry, meter, owner = CollectorRegistry(), Meter(3), speculation()
    telemetry = Telemetry(meter, owner, {"model_name": "m", "dp_rank": "0"}, registry)
    telemetry.flush()
    owner.config = DSparkConfig(verify_mode="static")
    telemetry.flush()
    assert scraped(registry, "dspark_settings") == {("compact", "block", "causal"): 0, ("static", "block", "causal"): 1}


def test_prometheus_is_not_imported_before_the_engine_has_set_its_directory():
    program = (
        "import sys; import sglang_dspark.serving.metrics, sglang_dspark.serving.routes, sglang_dspark.learning.meter; "
        "print('prometheus_client' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"
    )
