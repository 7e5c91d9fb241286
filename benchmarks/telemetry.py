"""What metering costs a step on the host: Meter.end and finish, with and without Prometheus, and a flush.

python benchmarks/telemetry.py
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from prometheus_client import CollectorRegistry
from sglang_dspark.learning.step_cost import ServerCost

from dspark_scheduler import AdditiveCostModel, Fingerprint, OnlineCostModel
from sglang_dspark.learning.confidence import Calibration
from sglang_dspark.learning.meter import PARTS, Meter
from sglang_dspark.serving.metrics import Telemetry
from sglang_dspark.settings.config import DSparkConfig

GAMMA, STEPS = 7, 1500


def owner() -> SimpleNamespace:
    """What the meter reads of `Speculation`, with a real calibration and a real cost model."""
    model = AdditiveCostModel(0.001, ([1, 64], [0, 0.001]), ([1, 512], [0, 0.02]), draft=([1, 448], [0.001, 0.004]))
    fingerprint = Fingerprint("t", "d", GAMMA, "cpu", "f", 1, "e")
    calibration = Calibration(GAMMA, "main", "online", Path("/no/such/draft"), fingerprint)
    return SimpleNamespace(
        config=DSparkConfig(),
        policy_name="causal",
        calibration=calibration,
        cost=ServerCost(OnlineCostModel(model), ([1, 64], [0.001, 0.003])),
        windows=SimpleNamespace(drafting="depth"),
    )


def measure(requests: int, prometheus: bool) -> tuple[float, float, float]:
    """Median microseconds of metering a step, of the calibration's part in it, and of one flush (0: none)."""
    speculation, meter, rng = owner(), Meter(GAMMA), np.random.default_rng(0)
    labels = {"model_name": "m", "dp_rank": "0"}
    telemetry = Telemetry(meter, speculation, labels, CollectorRegistry()) if prometheus else None
    windows = rng.integers(0, GAMMA + 1, requests)
    lengths = np.minimum(windows, rng.integers(0, GAMMA + 1, requests)) + 1
    step = SimpleNamespace(size=requests, context=100 * requests, greedy=np.zeros(requests, bool))
    ragged = SimpleNamespace(windows=torch.tensor(windows), block_size=GAMMA, rows=int(windows.sum()) + requests)
    committed = SimpleNamespace(lengths=torch.tensor(lengths), acceptance=torch.rand(requests, GAMMA))
    drafted = SimpleNamespace(logits=rng.normal(size=(requests, GAMMA)))
    budget = SimpleNamespace(tokens=int(windows.sum()))
    times, learning, flushes, observe = [], [], [], speculation.calibration.observe

    def timed(*arguments):
        began = time.perf_counter()
        observe(*arguments)
        learning.append(time.perf_counter() - began)

    speculation.calibration.observe = timed
    for number in range(STEPS):
        meter.begin()
        meter.planned(budget)
        for part in PARTS[:-1]:
            meter.mark(part)
        began = time.perf_counter()
        meter.end(step, drafted, ragged, ragged, committed, speculation)
        meter.finish(time.perf_counter())
        times.append(time.perf_counter() - began)
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
