"""What a step cost and what it brought, counted once on the host: for the cost model, calibration and telemetry."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sglang_dspark.step import Step

STALL_SECONDS = 1.0  # a gap between steps beyond this is idleness, not cost


@dataclass
class Totals:
    """Counts since the start; positions are 0-based drafts. Every rate divides by what was verified, not by gamma."""

    gamma: int
    steps: int = 0
    skipped: int = 0  # steps that did not draft
    offered: int = 0  # drafts within gamma, what static would verify
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    committed: int = 0
    rows: int = 0
    verified_at: np.ndarray = field(default=None)
    accepted_at: np.ndarray = field(default=None)
    windows: np.ndarray = field(default=None)
    seconds: dict = field(default_factory=lambda: dict.fromkeys(("step", "backbone", "draft", "verify", "host"), 0.0))
    predicted: float = 0.0
    budget: int = 0

    def __post_init__(self) -> None:
        self.verified_at = np.zeros(self.gamma, np.int64)
        self.accepted_at = np.zeros(self.gamma, np.int64)
        self.windows = np.zeros(self.gamma + 1, np.int64)


class Meter:
    """Times the parts of a step on the host's clock and counts its tokens. Never waits for a device."""

    def __init__(self, gamma: int) -> None:
        self.totals = Totals(gamma)
        self.last: dict = {}
        self._pending: dict | None = None
        self._begin = self._mark = self._end = 0.0
        self._parts: dict[str, float] = {}

    def begin(self, step: Step, budget) -> None:
        self._begin = self._mark = time.perf_counter()
        self._parts = {}
        self._budget = budget

    def mark(self, part: str) -> None:
        """The time since the last mark belongs to `part`."""
        now = time.perf_counter()
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
        pending["seconds"] = now - pending.pop("started")
        self.totals.seconds["step"] += pending["seconds"]
        return pending

    def end(self, step: Step, drafted, judged, verified, committed, speculation) -> None:
        """Count the step, teach the calibration, and keep its parts for `finish`."""
        t = self.totals
        lengths = committed.lengths.cpu().numpy()
        windows = judged.windows.cpu().numpy()
        k = judged.block_size
        reached = np.arange(k) < np.minimum(lengths, windows)[:, None]  # verified, everything before it accepted
        hits = np.arange(k) < (lengths - 1)[:, None]
        t.steps += 1
        t.skipped += drafted is None
        t.offered += t.gamma * step.size
        t.drafted += k * step.size
        t.verified += int(windows.sum())
        t.accepted += int((lengths - 1).sum())
        t.committed += int(lengths.sum())
        t.rows += verified.rows
        t.verified_at[:k] += reached.sum(0)
        t.accepted_at[:k] += (hits & reached).sum(0)
        t.windows += np.bincount(windows, minlength=t.gamma + 1)
        t.predicted += self._budget.step_seconds
        t.budget += self._budget.tokens
        if drafted is not None and drafted.logits is not None:
            labels = committed.acceptance.cpu().numpy()
            labels = np.where(np.isnan(labels), hits, labels)
            width = min(k, drafted.logits.shape[1])
            speculation.calibration.observe(drafted.logits[:, :width], step.greedy, labels[:, :width], reached[:, :width])
        self._end = time.perf_counter()
        self._keep(step, verified.rows, 0 if drafted is None else max(1, int((k * step.size if speculation.windows.drafting == "depth" else windows.sum()))))

    def _keep(self, step: Step, rows: int, slots: int) -> None:
        parts = self._parts
        host = self._end - self._begin - sum(parts.values())
        for name, seconds in (*parts.items(), ("host", host)):
            self.totals.seconds[name] += seconds
        self._pending = {"started": self._begin, "requests": step.size, "rows": rows, "context": step.context,
                         "slots": slots, "backbone_seconds": parts.get("backbone", 0.0),
                         "head_seconds": parts.get("draft", 0.0)}
