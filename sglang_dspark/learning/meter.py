"""What a step cost and what it brought, counted once on the host: for the cost model, calibration and telemetry."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from sglang_dspark.learning.history import History

STALL_SECONDS = 1.0  # a gap between steps beyond this is idleness, not cost
# What a step is made of; the host's part is the rest: planning, packing, bookkeeping.
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
    verified_at: np.ndarray = field(default=None)
    accepted_at: np.ndarray = field(default=None)
    confident_at: np.ndarray = field(default=None)
    predicted_at: np.ndarray = field(default=None)
    outcome_at: np.ndarray = field(default=None)
    windows: np.ndarray = field(default=None)
    seconds: dict = field(default_factory=lambda: dict.fromkeys(("step", *PARTS), 0.0))

    def __post_init__(self) -> None:
        for name in ("verified_at", "accepted_at", "confident_at"):
            setattr(self, name, np.zeros(self.gamma, np.int64))
        self.predicted_at, self.outcome_at = np.zeros(self.gamma), np.zeros(self.gamma)
        self.windows = np.zeros(self.gamma + 1, np.int64)


class Meter:
    """Times the parts of a step on the host's clock and counts its tokens. Never waits for a device.

    `telemetry`, where somebody sets it, is told that there is something new (see `serving.metrics.Telemetry`).
    """

    def __init__(self, gamma: int) -> None:
        self.totals = Totals(gamma)
        self.history = History(gamma)
        self.telemetry = None
        self.last: dict = {}  # the last step, for the status page
        self._config = None
        self._pending: dict | None = None
        self._predicted = 0.0
        self._begin = self._mark = self._end = 0.0
        self._parts: dict[str, float] = {}

    def begin(self) -> None:
        """A step starts here; what comes before the first mark is the host's."""
        self._begin = self._mark = time.perf_counter()
        self._parts = {}

    def planned(self, budget) -> None:
        self._budget = budget
        self.mark()

    def mark(self, part: str | None = None) -> None:
        """The time since the last mark belongs to `part`; None: to the host."""
        now = time.perf_counter()
        if part is not None:
            self._parts[part] = now - self._mark
        self._mark = now

    def interrupted(self) -> None:
        """A prefill runs between two steps: the time until the next step says nothing about the last one."""
        self._pending = None

    def finish(self, now: float) -> dict | None:
        """The last step's observation for `ServerCost.observe`, with its whole time; None if something came between."""
        pending, self._pending = self._pending, None
        if pending is None or now - self._end > STALL_SECONDS:
            return None
        seconds = pending["seconds"] = now - pending.pop("started")
        self.totals.seconds["step"] += seconds
        self.totals.timed += 1
        self.totals.predicted += self._predicted
        self.history.time(seconds, self._predicted, pending["requests"], pending["rows"])
        if self.telemetry is not None:
            self.telemetry.step(seconds, self._predicted)
        return pending

    def end(self, step, drafted, judged, verified, committed, speculation) -> None:
        """Count the step, teach the calibration, and keep its parts for `finish`."""
        lengths = committed.lengths.cpu().numpy()
        windows = judged.windows.cpu().numpy()
        k = judged.block_size
        reached = np.arange(k) < np.minimum(lengths, windows)[:, None]  # verified, everything before it accepted
        hits = np.arange(k) < (lengths - 1)[:, None]
        self.settings(speculation.config)
        self._count(step, drafted, k, lengths, windows, reached, hits)
        # Whole blocks where another batch was verified than judged (cap-accept): no second read from the device.
        self._count_rows(step, verified.rows, int(windows.sum()) if verified is judged else k * step.size)
        if drafted is not None and drafted.logits is not None:
            self._calibrate(step, drafted.logits, committed, reached, hits, speculation.calibration)
        slots = (
            0
            if drafted is None
            else max(1, int(k * step.size if speculation.windows.drafting == "depth" else windows.sum()))
        )
        length = self._budget.draft_length
        self._predict(step, verified.rows, slots, length, speculation.cost)
        self._end = time.perf_counter()
        self._keep(step, verified.rows, slots, length)
        self.last = {
            "requests": step.size,
            "context": step.context,
            "rows": verified.rows,
            "drafted": slots,
            "budget": self._budget.tokens,
            "verified": int(windows.sum()),
            "committed": int(lengths.sum()),
            "predicted_seconds": self._predicted,
        }
        if self.telemetry is not None:
            self.telemetry.wake()

    def settings(self, config) -> None:
        """The settings in force; a change is counted once, whoever tells of it first."""
        if self._config is not config:
            self.totals.changes += self._config is not None
            self._config = config
            self.history.settings(config)

    def _count(self, step, drafted, k: int, lengths, windows, reached, hits) -> None:
        t = self.totals
        counts = np.bincount(windows, minlength=t.gamma + 1)
        accepted, committed = int((lengths - 1).sum()), int(lengths.sum())
        t.steps += 1
        t.skipped += drafted is None
        t.requests += step.size
        t.offered += t.gamma * step.size
        t.drafted += k * step.size
        t.verified += int(windows.sum())
        t.accepted += accepted
        t.committed += committed
        t.verified_at[:k] += reached.sum(0)
        t.accepted_at[:k] += (hits & reached).sum(0)
        t.windows += counts
        t.budget += self._budget.tokens
        self.history.add(step.size, committed, drafted is None, counts)

    def _count_rows(self, step, rows: int, drafts: int) -> None:
        self.totals.rows += rows
        self.totals.padding += rows - step.size - drafts

    def _calibrate(self, step, logits: np.ndarray, committed, reached, hits, calibration) -> None:
        """Compare the confidence in use with what came of it, then let the calibration learn from it."""
        t, width = self.totals, min(reached.shape[1], logits.shape[1])
        logits, reached, hits = logits[:, :width], reached[:, :width], hits[:, :width]
        soft = committed.acceptance.cpu().numpy()[:, :width]
        labels = np.where(np.isnan(soft), hits, soft)
        t.confident_at[:width] += reached.sum(0)
        t.predicted_at[:width] += (calibration.conditional(logits, step.greedy) * reached).sum(0)
        t.outcome_at[:width] += (labels * reached).sum(0)
        calibration.observe(logits, step.greedy, labels, reached)

    def _predict(self, step, rows: int, slots: int, length: int, cost) -> None:
        """The seconds that the cost model gives the step that ran, whatever the plan was; 0 without a cost model."""
        self._predicted = 0.0
        if cost is not None:
            draft = cost.model.draft_seconds(slots) + cost.backbone_seconds(step.size, length) if slots else 0.0
            self._predicted = float(cost.step_seconds(step.size, rows, step.context) + draft)

    def _keep(self, step, rows: int, slots: int, length: int) -> None:
        parts = self._parts
        host = self._end - self._begin - sum(parts.values())
        for name, seconds in (*parts.items(), ("host", host)):
            self.totals.seconds[name] += seconds
        self._pending = {
            "started": self._begin,
            "requests": step.size,
            "rows": rows,
            "context": step.context,
            "slots": slots,
            "length": length,
            "backbone_seconds": parts.get("backbone", 0.0),
            "head_seconds": parts.get("draft", 0.0),
        }
