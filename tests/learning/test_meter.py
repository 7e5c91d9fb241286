"""What a step is counted as: tries, windows, padding, confidence, predicted time; the last minutes; and Prometheus's copy.

Bug classes: a rate divided by the block size instead of by what was verified; predicted and real time of different steps;
a memory that grows; a count that reaches Prometheus twice, or under the settings of before. Numbers are planted and small
enough to count by hand.
"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from dspark_scheduler import Plan
from dspark_scheduler.plan import DraftShape
from sglang_dspark.learning.clock import HostClock, StepTimes
from sglang_dspark.learning.history import SLOT_SECONDS, SLOTS, History
from sglang_dspark.learning.meter import Meter
from sglang_dspark.learning.report import Record, Report
from sglang_dspark.serving.metrics import Telemetry
from sglang_dspark.serving.status import measured_survival
from sglang_dspark.settings.config import DSparkConfig
from sglang_dspark.step.policies import Policy
from sglang_dspark.step.speculation import Speculation


class Cost:
    """A cost model of round numbers: 1 ms a row, 10 ms of block, 1 ms a drafted slot."""

    def step_seconds(self, requests, rows, context):
        return 0.001 * rows

    def draft_seconds(self, requests, slots, length):
        return 0.01 + 0.001 * slots


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


class Server:
    """What learns from steps, over planted numbers: the product's own `Speculation.learn` with a meter."""

    drafter = SimpleNamespace(graph=None)
    policy_name = "causal"
    learn, learn_time, _predicted = Speculation.learn, Speculation.learn_time, Speculation._predicted

    def __init__(self) -> None:
        self.config, self.cost, self.calibration = DSparkConfig(), Cost(), HalfSure()
        planner = SimpleNamespace(shape=DraftShape("depth", 3), publish=lambda *_: None)
        self.policy = Policy(planner, self.calibration, None, short_blocks=True)


def one_step(
    meter: Meter,
    windows: list[int],
    lengths: list[int],
    owner: Server,
    *,
    drafts: int = 3,
    rows: int | None = None,
    whole: bool = False,
    confident: bool = True,
) -> Record:
    """A step of `windows` and committed `lengths`, of blocks of `drafts`, whose forward ran `rows` rows."""
    requests, shape = len(windows), (len(windows), drafts)
    times = StepTimes(HostClock())
    for part in ("backbone", "draft", "verify"):
        with times.part(part):
            pass
    times.end()
    bounds = np.zeros(requests, np.int64), np.full(requests, drafts)
    plan = Plan(sum(windows), 0.0, 0.0, drafts, *bounds)
    rows = rows or sum(windows) + requests
    greedy, ids = np.zeros(requests, bool), tuple(range(requests))
    record = Record(1, ids, greedy, 10 * requests, plan, owner.policy, drafts, rows, whole, times)
    confidence = np.zeros(shape) if confident else None
    report = Report(record, np.array(lengths), np.array(windows), confidence, np.full(shape, np.nan))
    owner.learn(report, meter)
    return record


def timed(meter: Meter, owner: Server, record: Record) -> None:
    """Another step follows at once."""
    record.times.follow(StepTimes(HostClock()))
    owner.learn_time(record, meter)


def test_a_draft_outside_its_window_or_behind_a_refused_one_is_no_try():
    meter = Meter(3)
    one_step(meter, [3, 1, 0], [2, 2, 1], Server())
    totals = meter.totals
    # request 0: draft 1 accepted, draft 2 refused, draft 3 never judged; request 1: its one draft accepted; request 2: none
    assert totals.verified_at.tolist() == [2, 1, 0]
    assert totals.accepted_at.tolist() == [2, 0, 0]
    assert (totals.offered, totals.verified, totals.accepted, totals.committed) == (9, 4, 2, 5)
    assert totals.windows.tolist() == [1, 1, 0, 1]


def test_padding_is_rows_that_no_request_owns():
    meter = Meter(3)
    one_step(meter, [2, 1], [1, 1], Server(), rows=8)
    assert (meter.totals.rows, meter.totals.padding) == (8, 3)


def test_whole_blocks_are_counted_as_rows_where_they_are_verified_but_judged_by_windows():
    meter = Meter(3)
    one_step(meter, [1, 0], [2, 1], Server(), rows=9, whole=True, confident=False)  # 2 anchors, 6 drafts, 1 of padding
    assert (meter.totals.rows, meter.totals.padding, meter.totals.verified) == (9, 1, 1)


def test_confidence_is_compared_where_it_was_computed_and_only_there():
    meter, owner = Meter(3), Server()
    one_step(meter, [3, 1], [2, 2], owner)
    one_step(meter, [3, 3], [4, 4], owner, confident=False)
    totals = meter.totals
    assert totals.confident_at.tolist() == [2, 1, 0]
    assert totals.predicted_at.tolist() == [1.0, 0.5, 0.0]
    assert totals.outcome_at.tolist() == [2.0, 0.0, 0.0]
    assert len(owner.calibration.taught) == 1


def test_predicted_and_real_seconds_are_of_the_same_steps():
    meter, owner = Meter(3), Server()
    record = one_step(meter, [2, 2], [1, 1], owner)  # 6 rows, 6 slots of depth 3
    timed(meter, owner, record)
    assert meter.totals.predicted == pytest.approx(0.006 + 0.006 + 0.010)
    assert meter.totals.seconds["step"] == record.times.seconds and meter.totals.timed == 1
    record = one_step(meter, [2, 2], [1, 1], owner)
    owner.learn_time(record, meter)  # a prefill came between: nobody knows how long that step took
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

    registry, meter, owner = CollectorRegistry(), Meter(3), Server()
    telemetry = Telemetry(meter, owner, {"model_name": "m", "dp_rank": "0"}, registry)
    timed(meter, owner, one_step(meter, [3, 1, 0], [2, 2, 1], owner))
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

    registry, meter, owner = CollectorRegistry(), Meter(3), Server()
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
