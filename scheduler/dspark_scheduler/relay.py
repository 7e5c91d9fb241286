"""The relay: survival on its way to the planner, two steps late, and the types that make the lateness a fact.

The paper's §5.2 takes the budget of step t from confidences of step t-2: the host plans a step while the device is
still busy with the one before, and a budget that cannot know what is drafted now cannot leak it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import isnan

import numpy as np

from .survival import check_probabilities

MIN_LAG = 2


@dataclass(frozen=True)
class LaggedSurvival:
    """Survival that is at least two steps old. Made by `SurvivalRelay.read`.

    Attributes:
        values: [H, R, γ], what the last H steps that may be read said about the requests of the step being planned,
            youngest first. A row of NaN: nothing is known of this request there.
        step: the youngest step that any row was published at.
        now: the step being planned.

    Raises:
        ValueError: `now - step` is below 2, or values have another shape.
    """

    values: np.ndarray
    step: int
    now: int

    def __post_init__(self) -> None:
        if self.now - self.step < MIN_LAG:
            raise ValueError(
                f"survival of step {self.step} is too young to plan step {self.now}: {MIN_LAG} steps needed"
            )
        if self.values.ndim != 3:
            raise ValueError(f"survival must be [steps, requests, block size], got shape {self.values.shape}")

    @property
    def missing(self) -> np.ndarray:
        """[H, R] bool: where nothing is known of a request."""
        return np.isnan(self.values[..., 0])

    @property
    def complete(self) -> bool:
        """Whether everything is known of every request."""
        first = self.values[..., 0]
        return first.size == 0 or not isnan(first.item(first.argmax()))  # argmax finds a NaN before anything else

    def averaged(self) -> LaggedSurvival:
        """Every request's mean over its history, as a history of one step; NaN where it has none."""
        if len(self.values) == 1:
            return self
        if self.complete:
            return LaggedSurvival(self.values.mean(axis=0, keepdims=True), self.step, self.now)
        missing = self.missing
        known = np.count_nonzero(~missing, axis=0)[:, None]
        total = np.where(missing[..., None], 0.0, self.values).sum(axis=0)
        mean = np.divide(total, known, out=np.full(total.shape, np.nan), where=known > 0)
        return LaggedSurvival(mean[None], self.step, self.now)

    def filled(self, mean: np.ndarray) -> np.ndarray:
        """[H, R, γ] without a gap: what is not known is the request's own mean, or else `mean` [γ]."""
        if self.complete:
            return self.values
        own = self.averaged()
        own_or_mean = np.where(own.missing[0][:, None], mean, own.values[0])
        return np.where(self.missing[..., None], own_or_mean, self.values)


@dataclass(frozen=True)
class ContextSurvival:
    """Survival from a confidence that is a function of the context alone (policy `ahead`).

    Every entry is known before any token of the block is sampled, so a search over all of it cannot anticipate.

    Attributes:
        values: [R, γ] of this step.
        reads_drafted_tokens: whether the confidence head takes the drafted tokens as input
            (`confidence_head_with_markov` of the checkpoint). It has no default: the caller must know.

    Raises:
        ValueError: the confidence reads drafted tokens, or a value is not a probability.
    """

    values: np.ndarray
    reads_drafted_tokens: bool

    def __post_init__(self) -> None:
        if self.reads_drafted_tokens:
            raise ValueError(
                "policy 'ahead' needs a confidence head that reads the hidden state alone "
                "(confidence_head_with_markov: false): this one reads drafted tokens, and a budget taken from it "
                "would anticipate them"
            )
        if self.values.ndim != 2:
            raise ValueError(f"survival must be a matrix [requests, block size], got shape {self.values.shape}")
        check_probabilities(self.values, "survival")


@dataclass(frozen=True)
class _Entry:
    step: int
    request_ids: tuple[Hashable, ...]
    values: np.ndarray
    rows: dict[Hashable, int]


class SurvivalRelay:
    """A ring of what the last steps published, read at least `lag` steps late.

    Rows belong to a request and its generation: `request_ids` are whatever hashable key says so, for example
    `(slot, generation)` or the engine's request id. A slot that is reused under a new generation has no history.

    Args:
        lag: steps between publishing and reading, at least 2.
        max_age: steps after which a row is no longer history (it describes another context).

    Raises:
        ValueError: lag below 2, or max_age below lag.
    """

    def __init__(self, lag: int = MIN_LAG, max_age: int = 16) -> None:
        if lag < MIN_LAG:
            raise ValueError(f"a lag of {lag} would let the planner anticipate: at least {MIN_LAG} steps")
        if max_age < lag:
            raise ValueError(f"max_age {max_age} is below the lag {lag}")
        self.lag = lag
        self.max_age = max_age
        self._entries: list[_Entry] = []  # oldest first
        self._last_read = -1
        self._gamma: int | None = None

    def publish(self, step: int, request_ids: Sequence[Hashable], survival: np.ndarray) -> None:
        """File the survival [R, γ] that step `step` computed for `request_ids` [R]; the values are copied.

        Raises:
            ValueError: steps run backwards, or a step before the last one planned is published late enough that the
                clock must have been set forward to read younger values; shapes or ids do not fit; not probabilities.
        """
        ids = tuple(request_ids)
        values = np.array(survival)
        values.flags.writeable = False
        if self._entries and step <= self._entries[-1].step:
            raise ValueError(f"step {step} published after step {self._entries[-1].step}")
        if step < self._last_read - self.lag + 1:
            raise ValueError(
                f"step {step} published after step {self._last_read} was planned: the clock was set forward"
            )
        if values.ndim != 2 or len(values) != len(ids) or values.shape[1] != (self._gamma or values.shape[1]):
            raise ValueError(f"survival {values.shape} for {len(ids)} requests, block size {self._gamma}")
        check_probabilities(values, "survival")
        if self._entries and self._entries[-1].request_ids == ids:  # most steps run the same batch again
            rows = self._entries[-1].rows
        else:
            rows = {request: row for row, request in enumerate(ids)}
        if len(rows) != len(ids):
            raise ValueError(f"a request id appears twice in step {step}")
        self._gamma = values.shape[1]
        self._entries.append(_Entry(step, ids, values, rows))
        del self._entries[: -self.max_age - 1]

    def read(
        self, step: int, request_ids: Sequence[Hashable], gamma: int | None = None, history: int = 1
    ) -> LaggedSurvival:
        """What may be known when step `step` is planned.

        Args:
            step: the step being planned; never falls from call to call.
            request_ids: the requests of that step, in its order.
            gamma: block size, needed only as long as nothing was published.
            history: how many of the last published steps to hand out. 1: every request's own last row. More: those
                steps as they were, 1 <= H <= history.

        Returns:
            LaggedSurvival [H, R, γ]; rows older than `max_age` steps are not history any more.

        Raises:
            ValueError: steps run backwards, or the block size is not known yet.
        """
        if step < self._last_read:
            raise ValueError(f"step {step} planned after step {self._last_read}")
        gamma = self._gamma or gamma
        if gamma is None:
            raise ValueError("nothing was published yet: give the block size")
        self._last_read = step
        readable = [e for e in self._entries if step - self.max_age <= e.step <= step - self.lag]
        ids = tuple(request_ids)
        if not readable:
            return LaggedSurvival(np.full((1, len(ids), gamma), np.nan), step - self.lag, step)
        if history > 1:
            rows = [_rows_of(entry, ids) for entry in readable[-history:][::-1]]
            return LaggedSurvival(np.stack(rows), readable[-1].step, step)
        values = _rows_of(readable[-1], ids)
        for entry in readable[-2::-1]:  # ever older, for requests that sat out
            missing = np.isnan(values[:, 0])
            if not missing.any():
                break
            values = np.where(missing[:, None], _rows_of(entry, ids), values)
        return LaggedSurvival(values[None], readable[-1].step, step)


def _rows_of(entry: _Entry, ids: tuple[Hashable, ...]) -> np.ndarray:
    """What an entry says about these requests [R, γ], NaN where nothing; its own array if the batch is the same."""
    if entry.request_ids == ids:
        return entry.values
    rows = np.fromiter((entry.rows.get(request, -1) for request in ids), np.int64, len(ids))
    values = entry.values[rows]
    values[rows < 0] = np.nan
    return values
