"""What steps cost and what they brought, counted from their reports: for telemetry and the status page."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sglang_dspark.learning.history import History
from sglang_dspark.learning.report import Record, Report

# What a step is made of; the host's part is the rest on a CPU, and the time to launch the step on an accelerator.
PARTS = ("backbone", "draft", "verify", "accept", "commit", "host")


@dataclass
class Totals:
    """Counts since the start; positions are 0-based drafts. Every rate divides by what was verified, not by gamma.

    What each count is divided by to make a rate stands in docs/metrics.md. `verified_at[k]` counts drafts at position
    k that were verified and behind accepted ones only: the tries of which `accepted_at[k]` succeeded. `confident_at`
    are those tries whose confidence was computed; `predicted_at` and `outcome_at` sum their calibrated confidence and
    their outcome (Σ min(p, q) where the rule gives it, else 0 or 1). `seconds["step"]` sums the `timed` steps, those
    that another step followed at once; `predicted` sums the cost model's seconds of the same steps.
    """

    gamma: int
    steps: int = 0
    timed: int = 0
    skipped: int = 0  # steps that did not draft
    requests: int = 0  # requests of all steps
    offered: int = 0  # drafts within gamma, what static would verify
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    committed: int = 0
    rows: int = 0  # of the target's forwards, padding included
    padding: int = 0
    budget: int = 0
    predicted: float = 0.0
    changes: int = 0  # settings switched at run time
    verified_at: np.ndarray = field(init=False)
    accepted_at: np.ndarray = field(init=False)
    confident_at: np.ndarray = field(init=False)
    predicted_at: np.ndarray = field(init=False)
    outcome_at: np.ndarray = field(init=False)
    windows: np.ndarray = field(init=False)
    seconds: dict = field(default_factory=lambda: dict.fromkeys(("step", *PARTS), 0.0))

    def __post_init__(self) -> None:
        for name in ("verified_at", "accepted_at", "confident_at"):
            setattr(self, name, np.zeros(self.gamma, np.int64))
        self.predicted_at, self.outcome_at = np.zeros(self.gamma), np.zeros(self.gamma)
        self.windows = np.zeros(self.gamma + 1, np.int64)


class Meter:
    """Counts steps from their reports.

    `telemetry`, where somebody sets it, is told that there is something new (see `serving.metrics.Telemetry`).
    """

    def __init__(self, gamma: int) -> None:
        self.totals = Totals(gamma)
        self.history = History(gamma)
        self.telemetry = None
        self.last: dict = {}  # the last step, for the status page
        self._config = None

    def settings(self, config) -> None:
        """The settings in force; a change is counted once, whoever tells of it first."""
        if self._config is not config:
            self.totals.changes += self._config is not None
            self._config = config
            self.history.settings(config)

    def count(self, report: Report, confidence: np.ndarray | None) -> None:
        """Count one step. Args: confidence: float [R, k] calibrated, as it was in use; None if it had none."""
        record = report.record
        self._count_tokens(report)
        if confidence is not None:
            self._count_confidence(report, confidence)
        self.last = {
            "requests": record.requests,
            "context": record.context,
            "rows": record.graph_rows,
            "drafted": record.slots,
            "budget": record.plan.tokens,
            "verified": int(report.windows.sum()),
            "committed": int(report.lengths.sum()),
            "predicted_seconds": record.predicted,
        }
        if self.telemetry is not None:
            self.telemetry.wake()

    def time(self, record: Record) -> None:
        """Count the seconds of a step and of its parts, once they are known."""
        parts, seconds = record.times.part_seconds(), record.times.seconds
        on_host = record.times.launched - (sum(parts.values()) if record.times.on_host else 0.0)
        for name, spent in (*parts.items(), ("host", on_host)):
            self.totals.seconds[name] += spent
        if seconds is None:
            return
        self.totals.seconds["step"] += seconds
        self.totals.timed += 1
        self.totals.predicted += record.predicted
        self.history.time(seconds, record.predicted, record.requests, record.rows)
        if self.telemetry is not None:
            self.telemetry.step(seconds, record.predicted)

    def _count_tokens(self, report: Report) -> None:
        t, record, k = self.totals, report.record, report.record.block_size
        counts = np.bincount(report.windows, minlength=t.gamma + 1)
        committed = int(report.lengths.sum())
        t.steps += 1
        t.skipped += k == 0
        t.requests += record.requests
        t.offered += t.gamma * record.requests
        t.drafted += k * record.requests
        t.verified += int(report.windows.sum())
        t.accepted += committed - record.requests
        t.committed += committed
        t.verified_at[:k] += report.tried.sum(0)
        t.accepted_at[:k] += (report.accepted & report.tried).sum(0)
        t.windows += counts
        t.budget += record.plan.tokens
        t.rows += record.graph_rows
        t.padding += record.graph_rows - report.rows
        self.history.add(record.requests, committed, k == 0, counts)

    def _count_confidence(self, report: Report, confidence: np.ndarray) -> None:
        t, width = self.totals, confidence.shape[1]
        tried = report.tried[:, :width]
        t.confident_at[:width] += tried.sum(0)
        t.predicted_at[:width] += (confidence * tried).sum(0)
        t.outcome_at[:width] += (report.outcomes[:, :width] * tried).sum(0)
