"""What learning from a step costs the host: `Speculation.learn` and `learn_time`, with and without Prometheus, and a flush.

python benchmarks/telemetry.py
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from dspark_scheduler import POLICIES, AdditiveCostModel, Fingerprint, OnlineCostModel, Plan, Planner
from sglang_dspark.learning.clock import HostClock, StepTimes
from sglang_dspark.learning.confidence import Calibration
from sglang_dspark.learning.meter import PARTS, Meter
from sglang_dspark.learning.report import Record, Report
from sglang_dspark.serving.metrics import Telemetry
from sglang_dspark.settings.config import DSparkConfig
from sglang_dspark.step.policies import CausalWindows
from sglang_dspark.step.speculation import Speculation

GAMMA, STEPS = 7, 1500


class Owner:
    """What learns from steps, with a real calibration and a real cost model."""

    drafter, policy_name = SimpleNamespace(graph=None), "causal"
    learn, learn_time, _predicted = Speculation.learn, Speculation.learn_time, Speculation._predicted

    def __init__(self) -> None:
        tables = ([1, 64], [0, 0.001]), ([1, 512], [0, 0.02])
        model = AdditiveCostModel(0.001, *tables, head=([1, 448], [0.001, 0.004]), block=([1, 64], [0.001, 0.003]))
        fingerprint = Fingerprint("t", "d", GAMMA, "cpu", "f", 1, "e")
        self.config, self.cost = DSparkConfig(), OnlineCostModel(model)
        self.calibration = Calibration(GAMMA, "main", "online", Path("/no/such/draft"), fingerprint)
        planner = Planner(GAMMA, self.cost, POLICIES["causal"], drafting="depth")
        self.policy = CausalWindows(planner, self.calibration, None, short_blocks=True)


def reports(owner: Owner, requests: int):
    """STEPS reports of steps that one another follow at once."""
    rng = np.random.default_rng(0)
    windows = rng.integers(0, GAMMA + 1, requests)
    lengths = np.minimum(windows, rng.integers(0, GAMMA + 1, requests)) + 1
    shape, ids, greedy = (requests, GAMMA), tuple(range(requests)), np.zeros(requests, bool)
    confidence, acceptance = rng.normal(size=shape), rng.random(shape)
    high = np.full(requests, GAMMA)
    plan = Plan(int(windows.sum()), 0.0, 0.0, GAMMA, np.zeros_like(high), high)
    last = None
    for number in range(STEPS):
        times = StepTimes(HostClock())
        for part in PARTS[:-1]:
            with times.part(part):
                pass
        times.end()
        if last is not None:
            last.times.follow(times)
        rows = requests + int(windows.sum())
        last = Record(number, ids, greedy, 100 * requests, plan, owner.policy, GAMMA, rows, False, times)
        yield Report(last, lengths, windows, confidence, acceptance)


def measure(requests: int, prometheus: bool) -> tuple[float, float, float]:
    """Median microseconds of learning from a step, of the calibration's part in it, and of one flush (0: none)."""
    owner, meter = Owner(), Meter(GAMMA)
    labels = {"model_name": "m", "dp_rank": "0"}
    telemetry = Telemetry(meter, owner, labels, CollectorRegistry()) if prometheus else None
    times, learning, flushes, observe, last = [], [], [], owner.calibration.observe, None

    def timed(*arguments):
        began = time.perf_counter()
        observe(*arguments)
        learning.append(time.perf_counter() - began)

    owner.calibration.observe = timed
    for number, report in enumerate(reports(owner, requests)):
        began = time.perf_counter()
        owner.learn(report, meter)
        if last is not None:
            owner.learn_time(last, meter)
        times.append(time.perf_counter() - began)
        last = report.record
        if telemetry is not None and number % 50 == 49:
            began = time.perf_counter()
            telemetry.flush()
            flushes.append(time.perf_counter() - began)
    return tuple(1e6 * float(np.median(values)) if values else 0.0 for values in (times, learning, flushes))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for count in (1, 8, 64):
        for on in (False, True):
            total, calibration, flush = measure(count, on)
            print(
                f"{count:3} requests, prometheus {'on ' if on else 'off'}: {total - calibration:4.0f} us metering, "
                f"{calibration:4.0f} us calibration, {flush:4.0f} us a flush"
            )
