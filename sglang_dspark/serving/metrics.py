"""Prometheus metrics of speculation, in SGLang's own `/metrics` (with --enable-metrics): one table, fed from the meter.

A step only adds its time to a list and sets a flag; a daemon thread copies the meter's totals to Prometheus a few times
a second. prometheus_client decides when it is imported whether it works across processes, and SGLang sets that up late:
so it is imported in `Telemetry` alone, never while plugins load.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sglang_dspark.learning.meter import PARTS, Meter

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_dspark.learning.meter import Totals

FLUSH_SECONDS = 0.25
STEP_BUCKETS = (
    0.002,
    0.004,
    0.006,
    0.008,
    0.012,
    0.016,
    0.024,
    0.032,
    0.048,
    0.064,
    0.096,
    0.128,
    0.192,
    0.256,
    0.512,
    1.024,
    2.048,
)
RATIO_BUCKETS = (0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)


@dataclass(frozen=True)
class Metric:
    """One metric: its name as scraped, kind, own labels, and for counters how it is read from the meter's totals.

    `read` returns a number, or for a metric with a label one number per label value in the order of `values(gamma)`.
    """

    name: str
    kind: str  # counter, histogram or gauge
    help: str
    label: str | None = None
    values: Callable[[int], tuple[str, ...]] | None = None
    read: Callable[[Totals], object] | None = None
    buckets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        counts = self.name.endswith("_total")
        if self.kind not in ("counter", "histogram", "gauge") or counts != (self.kind == "counter"):
            raise ValueError(f"{self.name}: counters, and they alone, end in _total")
        if (self.label is None) != (self.values is None) and self.kind == "counter":
            raise ValueError(f"{self.name}: a label needs its values")


def _positions(gamma: int) -> tuple[str, ...]:
    return tuple(str(k + 1) for k in range(gamma))


def _sizes(gamma: int) -> tuple[str, ...]:
    return tuple(str(w) for w in range(gamma + 1))


def _counter(name: str, help: str, read) -> Metric:
    return Metric(name, "counter", help, read=read)


def _by_position(name: str, help: str, read) -> Metric:
    return Metric(name, "counter", help, "position", _positions, read)


METRICS = (
    _counter("dspark_steps_total", "Decode steps.", lambda t: t.steps),
    _counter(
        "dspark_steps_without_draft_total",
        "Decode steps that did not draft (of dspark_steps_total).",
        lambda t: t.skipped,
    ),
    _counter(
        "dspark_step_requests_total",
        "Requests of all decode steps; divided by dspark_steps_total, the load.",
        lambda t: t.requests,
    ),
    _counter(
        "dspark_drafts_offered_total",
        "Drafts of whole blocks: block size times requests, every step.",
        lambda t: t.offered,
    ),
    _counter("dspark_drafts_drafted_total", "Drafts that the draft model's block length covered.", lambda t: t.drafted),
    _counter(
        "dspark_drafts_verified_total",
        "Drafts inside verify windows: the denominator of acceptance.",
        lambda t: t.verified,
    ),
    _counter("dspark_drafts_accepted_total", "Drafts that were verified and accepted.", lambda t: t.accepted),
    _counter(
        "dspark_tokens_committed_total",
        "Tokens emitted by decode steps: accepted drafts, one more per request.",
        lambda t: t.committed,
    ),
    _counter("dspark_budget_drafts_total", "Drafts that the planner's budget allowed.", lambda t: t.budget),
    _counter("dspark_rows_total", "Rows of the target's verify forwards, padding included.", lambda t: t.rows),
    _counter("dspark_padding_rows_total", "Rows of padding (of dspark_rows_total).", lambda t: t.padding),
    _counter("dspark_settings_changes_total", "Settings switched at run time.", lambda t: t.changes),
    _by_position(
        "dspark_position_tried_total",
        "Verified drafts at a position whose predecessors were all accepted.",
        lambda t: t.verified_at,
    ),
    _by_position(
        "dspark_position_accepted_total",
        "Those of dspark_position_tried_total that were accepted.",
        lambda t: t.accepted_at,
    ),
    _by_position(
        "dspark_confidence_tried_total", "Tries at a position whose confidence was computed.", lambda t: t.confident_at
    ),
    _by_position(
        "dspark_confidence_predicted_total",
        "Sum of calibrated confidence over the same tries.",
        lambda t: t.predicted_at,
    ),
    _by_position(
        "dspark_confidence_outcome_total",
        "Sum of outcomes (0, 1, or their probability) over the same tries.",
        lambda t: t.outcome_at,
    ),
    Metric(
        "dspark_windows_total",
        "counter",
        "Verify windows by size in drafts: one per request and step.",
        "window",
        _sizes,
        lambda t: t.windows,
    ),
    Metric(
        "dspark_part_seconds_total",
        "counter",
        "Host seconds of the parts of all decode steps.",
        "part",
        lambda gamma: PARTS,
        lambda t: [t.seconds[part] for part in PARTS],
    ),
    _counter(
        "dspark_predicted_step_seconds_total",
        "Seconds that the cost model predicted for the steps of dspark_step_seconds, from their real rows.",
        lambda t: t.predicted,
    ),
    Metric(
        "dspark_step_seconds",
        "histogram",
        "Whole decode steps that another step followed at once.",
        buckets=STEP_BUCKETS,
    ),
    Metric(
        "dspark_step_prediction_ratio", "histogram", "Real over predicted seconds of a step.", buckets=RATIO_BUCKETS
    ),
    Metric(
        "dspark_calibration_error",
        "gauge",
        "Expected calibration error of the confidence in use; kind is sampled or greedy.",
        "position",
    ),
    Metric("dspark_settings", "gauge", "1 for the settings in force."),
)
EXTRA_LABELS = {
    "dspark_calibration_error": ("kind",),
    "dspark_settings": ("verify_mode", "accept_rule", "window_policy"),
}


class Telemetry:
    """Copies one meter to Prometheus from a thread of its own.

    Args:
        meter: to read; it is told where to report.
        speculation: whose settings and calibration the gauges show.
        labels: labels and values that every series carries (model_name, dp_rank).
        registry: None means prometheus_client's own, which SGLang's `/metrics` collects across processes.
    """

    def __init__(self, meter: Meter, speculation, labels: dict[str, str], registry=None) -> None:
        self.meter, self.speculation, self.labels = meter, speculation, labels
        self._series = {m.name: _make(m, tuple(labels), registry) for m in METRICS}
        gamma = meter.totals.gamma
        self._counters = [(m.read, self._children(m, gamma)) for m in METRICS if m.kind == "counter"]
        self._seen = [np.zeros(len(children)) for _, children in self._counters]
        self._steps: deque[tuple[float, float]] = deque(maxlen=65536)
        self._settings: tuple | None = None
        self._news = threading.Event()
        self._lock = threading.Lock()
        meter.telemetry = self
        threading.Thread(target=self._run, name="dspark-telemetry", daemon=True).start()

    def step(self, seconds: float, predicted: float) -> None:
        """Note a step's whole time; called on the step's own thread, so it only appends."""
        self._steps.append((seconds, predicted))

    def wake(self) -> None:
        """There is something to copy."""
        self._news.set()

    def flush(self) -> None:
        """Copy what is new now."""
        with self._lock:
            for place, (read, children) in enumerate(self._counters):
                now = np.atleast_1d(np.array(read(self.meter.totals), np.float64))
                for child, new in zip(children, now - self._seen[place]):
                    if new > 0:
                        child.inc(float(new))
                self._seen[place] = now
            self._flush_steps()
            self._flush_gauges()

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            self._news.wait()
            pause.wait(FLUSH_SECONDS)
            self._news.clear()
            self.flush()

    def _flush_steps(self) -> None:
        times = self._series["dspark_step_seconds"].labels(**self.labels)
        ratios = self._series["dspark_step_prediction_ratio"].labels(**self.labels)
        while self._steps:
            seconds, predicted = self._steps.popleft()
            times.observe(seconds)
            if predicted > 0:
                ratios.observe(seconds / predicted)

    def _flush_gauges(self) -> None:
        config = self.speculation.config
        settings = (config.verify_mode, config.accept_rule, self.speculation.policy_name)
        if settings != self._settings:
            for values, on in ((self._settings, 0), (settings, 1)):
                if values is not None:
                    named = dict(zip(EXTRA_LABELS["dspark_settings"], values))
                    self._series["dspark_settings"].labels(**self.labels, **named).set(on)
            self._settings = settings
        errors = self._series["dspark_calibration_error"]
        for kind, values in self.speculation.calibration.ece().items():
            for k, error in enumerate(values):
                if error is not None:
                    errors.labels(**self.labels, position=str(k + 1), kind=kind).set(error)

    def _children(self, metric: Metric, gamma: int) -> list:
        series = self._series[metric.name]
        if metric.label is None:
            return [series.labels(**self.labels)]
        return [series.labels(**self.labels, **{metric.label: value}) for value in metric.values(gamma)]


def _make(metric: Metric, labels: tuple[str, ...], registry):
    import prometheus_client

    names = (*labels, *((metric.label,) if metric.label else ()), *EXTRA_LABELS.get(metric.name, ()))
    options = {} if registry is None else {"registry": registry}
    if metric.kind == "counter":
        return prometheus_client.Counter(metric.name, metric.help, names, **options)
    if metric.kind == "histogram":
        return prometheus_client.Histogram(metric.name, metric.help, names, buckets=metric.buckets, **options)
    return prometheus_client.Gauge(metric.name, metric.help, names, multiprocess_mode="mostrecent", **options)


def start(meter: Meter, speculation) -> Telemetry | None:
    """Telemetry of a scheduler process, where SGLang's metrics are on; None elsewhere, and on ranks but the first."""
    from sglang.srt.runtime_context import get_observability, get_parallel, get_serving

    parallel = get_parallel()
    if not get_observability().enable_metrics or parallel.attn_tp_rank or parallel.attn_cp_rank or parallel.pp_rank:
        return None
    labels = {"model_name": str(get_serving().served_model_name), "dp_rank": str(parallel.dp_rank or 0)}
    return Telemetry(meter, speculation, labels)
