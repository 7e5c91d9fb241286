"""What a step brought, on its way from the device to the host: issued when the step is launched, read when it is due.

On a plain CPU a report is due at once. Where steps are launched ahead of the device it is due two steps later: by then the
engine itself has waited for that step's result, so reading it waits for nothing, and every rank reads the same one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from dspark_scheduler import Plan, Planner
from sglang_dspark.learning.clock import StepTimes

LAG = 2  # steps between issuing a report and reading it, where a step does not wait for the one before


class Learner(Protocol):
    """Who planned a step, and learns from what came of it."""

    planner: Planner

    def learn(self, report: Report) -> np.ndarray | None:
        """The calibrated confidence float64 [R, k] as it was before this lesson; None if the step had none."""


@dataclass
class Record:
    """What the host knows of a step when it is launched.

    Args:
        number: of the step, rising. ids: [R] keys of its requests. greedy: bool [R]. context: tokens of all prefixes.
        plan: what was planned; policy: by whom, who learns from the report.
        block_size: drafts that were drafted for each request, 0 if none. graph_rows: rows of the target's forward, padding
            included. whole: whether whole blocks were verified and the windows only judged (cap-accept).
        times: when the step and its parts began and ended.
        slots, rows, predicted: drafted slots, rows of the target's forward without padding, and the cost model's seconds
            for the step; known when its report is counted.
    """

    number: int
    ids: tuple[Hashable, ...]
    greedy: np.ndarray
    context: int
    plan: Plan
    policy: Learner
    block_size: int
    graph_rows: int
    whole: bool
    times: StepTimes
    slots: int = 0
    rows: int = 0
    predicted: float = 0.0

    @property
    def requests(self) -> int:
        return len(self.ids)


@dataclass
class Report:
    """A record with what its step computed, all on the host.

    Args:
        lengths: int64 [R] committed tokens, bonus included. windows: int64 [R] drafts that were judged.
        confidence: float64 [R, k] raw logits of the drafts that were drafted; None if there is no confidence.
        acceptance: float64 [R, k] Σ min(p, q) at verified drafts, NaN elsewhere.
    """

    record: Record
    lengths: np.ndarray
    windows: np.ndarray
    confidence: np.ndarray | None
    acceptance: np.ndarray

    @property
    def tried(self) -> np.ndarray:
        """bool [R, k]: the draft was judged, and everything before it accepted."""
        return self._column < np.minimum(self.lengths, self.windows)[:, None]

    @property
    def accepted(self) -> np.ndarray:
        """bool [R, k]."""
        return self._column < (self.lengths - 1)[:, None]

    @property
    def outcomes(self) -> np.ndarray:
        """float64 [R, k]: the probability of acceptance where the rule gives it, else 0 or 1."""
        return np.where(np.isnan(self.acceptance), self.accepted, self.acceptance)

    @property
    def rows(self) -> int:
        """Rows of the target's forward without padding."""
        verified = self.record.block_size * self.record.requests if self.record.whole else int(self.windows.sum())
        return self.record.requests + verified

    @property
    def _column(self) -> np.ndarray:
        return np.arange(self.record.block_size)


@dataclass
class Reports:
    """Reports between issue and reading: one copy to the host per step, and no wait before it is due.

    Args:
        device: where steps run. lag: steps until a report is due; 0 reads it at once.
    """

    device: torch.device
    lag: int
    _waiting: deque[tuple[Record, torch.Tensor, bool, object]] = field(default_factory=deque)
    _free: dict[torch.Size, list[torch.Tensor]] = field(default_factory=dict)

    def issue(
        self,
        record: Record,
        lengths: torch.Tensor,
        windows: torch.Tensor,
        confidence: torch.Tensor | None,
        acceptance: torch.Tensor,
    ) -> None:
        """Start the copy of one step.

        Args: lengths, windows int [R]; confidence float [R, k] or None; acceptance float [R, k].
        """
        parts = [lengths[:, None], windows[:, None], acceptance]
        if confidence is not None:
            parts.append(confidence)
        packed = torch.cat([part.to(torch.float32) for part in parts], dim=1)
        landed = None
        if self.device.type != "cpu":
            free = self._free.setdefault(packed.shape, [])
            on_host = free.pop() if free else torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            on_host.copy_(packed, non_blocking=True)
            landed = torch.get_device_module(self.device).Event()
            landed.record()
            packed = on_host
        self._waiting.append((record, packed, confidence is not None, landed))

    def due(self, number: int) -> Iterator[Report]:
        """The reports that step `number` may read, oldest first; each is handed out once."""
        while self._waiting and self._waiting[0][0].number <= number - self.lag:
            record, packed, confident, landed = self._waiting.popleft()
            if landed is not None:
                landed.synchronize()
            values = packed.numpy().astype(np.float64)
            if landed is not None:
                self._free[packed.shape].append(packed)
            lengths, windows = values[:, 0].astype(np.int64), values[:, 1].astype(np.int64)
            k = record.block_size
            confidence = values[:, 2 + k :] if confident else None
            yield Report(record, lengths, windows, confidence, values[:, 2 : 2 + k])
