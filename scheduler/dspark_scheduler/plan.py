"""A plan, and the terms it has to meet: bounds of every window, the draft's shape, and what everything costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from .cost import CostModel
from .windows import most, per_request

DRAFTING = ("block", "depth", "windows")


@dataclass(frozen=True)
class DraftShape:
    """What a drafting step computes.

    Attributes:
        kind: "block": every block whole, whatever is verified of it. "depth": the longest window, for all requests.
            "windows": blocks as long as the longest window, of which only what is verified is sampled.
        gamma: block size.

    Raises:
        ValueError: unknown kind, or gamma below 1.
    """

    kind: str
    gamma: int

    def __post_init__(self) -> None:
        if self.kind not in DRAFTING:
            raise ValueError(f"drafting {self.kind!r} is not one of {DRAFTING}")
        if self.gamma < 1:
            raise ValueError(f"block size {self.gamma}")

    def run(self, length: int) -> int:
        """Length of the blocks that are run if no window is longer than `length`; 0: none is."""
        return self.gamma if self.kind == "block" and length else length

    def slots(self, requests: int, length: int, verified: int | range) -> int | np.ndarray:
        """Slots that are sampled of these blocks when `verified` drafts are; a range asks for all its choices at once."""
        if self.kind == "windows":
            return np.asarray(verified) if isinstance(verified, range) else verified
        return requests * self.run(length)


@dataclass(frozen=True, eq=False)
class Terms:
    """What a step's plan must respect, and what it is paid in.

    Attributes:
        cost: seconds of a step.
        shape: what the draft computes.
        low, high: int64 [R], 0 <= low <= high <= γ, bounds of every window.
        context: tokens of context of all requests together.
        max_step_seconds: longest step (an inter-token latency goal). If all are longer, the cheapest, filled.
    """

    cost: CostModel
    shape: DraftShape
    low: np.ndarray
    high: np.ndarray
    context: float = 0.0
    max_step_seconds: float | None = None

    @classmethod
    def of(
        cls,
        cost: CostModel,
        shape: DraftShape,
        requests: int,
        low: int | np.ndarray = 0,
        high: int | np.ndarray | None = None,
        context: float = 0.0,
        max_step_seconds: float | None = None,
    ) -> Terms:
        """Terms of R requests from bounds as they come: a number or one per request, of which a maximum beats a minimum.

        Raises:
            ValueError: R is 0, or a bound is negative or has another shape.
        """
        if requests < 1:
            raise ValueError("requests >= 1 are needed to plan a step")
        deepest = np.minimum(per_request(shape.gamma if high is None else high, requests, "high"), shape.gamma)
        shallowest = np.minimum(per_request(low, requests, "low"), deepest)
        return cls(cost, shape, shallowest, deepest, context, max_step_seconds)

    @cached_property
    def least(self) -> int:
        """The highest of the minima: no plan's longest window is shorter."""
        return int(most(self.low))

    @property
    def lengths(self) -> range:
        """Lengths of the longest window that a plan may choose from, rising; empty if nobody may be verified."""
        deepest = int(most(self.high))
        shortest = deepest if self.shape.kind == "block" else self.least
        return range(max(shortest, 1), deepest + 1)

    @property
    def plain_seconds(self) -> float:
        """Seconds of a step that does not draft."""
        requests = len(self.low)
        return float(self.cost.step_seconds(requests, requests, self.context))

    def at(self, window: int) -> Terms:
        """The same terms, but every request verifies `window` drafts, as far as its bounds allow."""
        fixed = np.clip(window, self.low, self.high)
        return replace(self, low=fixed, high=fixed)

    def seconds(self, tokens: range, length: int) -> np.ndarray:
        """Seconds, float64, of steps that verify these numbers of drafts of blocks in which no window exceeds `length`."""
        requests, run = len(self.low), self.shape.run(length)
        rows = range(requests + tokens.start, requests + tokens.stop)
        draft = self.cost.draft_seconds(requests, self.shape.slots(requests, length, tokens), run)
        return np.asarray(self.cost.step_seconds(requests, rows, self.context) + draft)

    def plan(self, tokens: int, expected_tokens: float, step_seconds: float, draft_length: int) -> Plan:
        """The plan that verifies `tokens` drafts under these terms; 0 for `draft_length`: it does not draft."""
        high = np.minimum(self.high, draft_length)
        low = np.minimum(self.low, high)
        windows = None if draft_length else high
        return Plan(tokens, expected_tokens, step_seconds, draft_length, low, high, windows)


@dataclass(frozen=True, eq=False)
class Plan:
    """What one step may do. (tokens, low, high) say all that is left to decide: where the drafts are verified.

    Attributes:
        tokens: K, drafted tokens to verify in all, Σ low <= K <= Σ high.
        expected_tokens: tokens the step is expected to commit, bonus tokens included.
        step_seconds: what the step is expected to take, drafting included.
        draft_length: slots the draft proposes for each request, no window is longer; 0: it does not draft at all.
        low, high: int64 [R] bounds of the windows.
        windows: int64 [R], where they are known before the draft; None where they follow from this step's survival.
        seconds: float64 [Σ high - Σ low + 1] seconds of the step by K, from Σ low on, where K itself follows from this
            step's survival (policy `ahead`); infinite above the ceiling. None where K is fixed.
        probe: whether the step tries what the planner would not choose.

    Raises:
        ValueError: the numbers contradict each other.
    """

    tokens: int
    expected_tokens: float
    step_seconds: float
    draft_length: int
    low: np.ndarray
    high: np.ndarray
    windows: np.ndarray | None = None
    seconds: np.ndarray | None = None
    probe: bool = False

    def __post_init__(self) -> None:
        in_bounds = int(np.add.reduce(self.low)) <= self.tokens <= int(np.add.reduce(self.high))
        if not in_bounds or most(self.high) > self.draft_length:
            raise ValueError(f"inconsistent plan {self}")
        if self.windows is not None and int(np.add.reduce(self.windows)) != self.tokens:
            raise ValueError(f"windows {self.windows.tolist()} do not spend {self.tokens} tokens")

    @property
    def skip_draft(self) -> bool:
        """Plain decoding is expected to be faster, or nobody may be verified: do not draft at all."""
        return self.draft_length == 0

    @property
    def numbers(self) -> np.ndarray:
        """int64 [2 + 3R]: all that the step's batch depends on, to be the same on every rank (see `Planner.adopt`)."""
        windows = np.full(len(self.low), -1) if self.windows is None else self.windows
        return np.concatenate([[self.tokens, self.draft_length], self.low, self.high, windows])

    def with_numbers(self, numbers: np.ndarray) -> Plan:
        """This plan with the `numbers` of another rank's; the expectations stay, as nothing is decided by them."""
        tokens, length = numbers[:2].tolist()
        low, high, windows = numbers[2:].reshape(3, -1)
        known = None if windows.min(initial=0) < 0 else windows
        return replace(self, tokens=tokens, draft_length=length, low=low, high=high, windows=known, seconds=None)
