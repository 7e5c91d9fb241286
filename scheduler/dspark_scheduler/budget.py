"""The budget: how many drafted tokens this step may verify, so that most tokens are committed per second."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .cost import CostModel
from .relay import ContextSurvival, LaggedSurvival
from .windows import window_bounds

DRAFTING = ("block", "depth", "windows")


@dataclass(frozen=True)
class Budget:
    """What one step may do.

    Attributes:
        tokens: K, drafted tokens to verify in all.
        expected_tokens: tokens the step is expected to commit, bonus tokens included.
        step_seconds: what the step is expected to take, drafting included.
        skip_draft: plain decoding is expected to be faster: do not draft at all (tokens is 0).
        draft_length: slots the draft proposes for each request (0 if skipped); no window is longer.
    """

    tokens: int
    expected_tokens: float
    step_seconds: float
    skip_draft: bool
    draft_length: int

    def __post_init__(self) -> None:
        if self.tokens < 0 or self.draft_length < 0 or (self.skip_draft and self.tokens + self.draft_length):
            raise ValueError(f"inconsistent budget {self}")


def best_budget(
    values: np.ndarray,
    cost: CostModel,
    *,
    min_window: int | np.ndarray = 0,
    max_window: int | np.ndarray | None = None,
    max_step_seconds: float | None = None,
    context: float = 0,
    drafting: str = "block",
    block: int | None = None,
    allow_skip: bool = True,
) -> Budget:
    """The K that maximises expected committed tokens per second, over all K (paper §5.2: Algorithm 1 without `break`).

    With the candidates sorted by survival a_(1) >= a_(2) >= ..., verifying the best K commits τ(K) = R + Σ_{i<=K} a_(i)
    tokens in T(K) = step_seconds(R, R + K) + draft_seconds(slots). All K are compared, so a cost curve with jumps
    cannot trap the search, and inside a tier, where T is flat, the last slot wins as long as it adds anything. Fed with
    survival of the tokens it decides about, this anticipates: a scheduler calls `plan_budget`.

    Args:
        values: [R, γ] survival, R >= 1, non-increasing along rows, no NaN; or [H, R, γ], equally likely cases of it.
            Then τ(K) is the mean over the cases of what their own best K commit: windows are chosen later, by the
            survival that will really be there.
        cost: seconds of a step; `AdditiveCostModel` or `OnlineCostModel`.
        min_window, max_window: bounds of every window, a number or one per request [R]; None is γ. A minimum above
            zero anywhere forbids skipping the draft: whoever sets it asks for drafting.
        max_step_seconds: longest step (an inter-token latency goal). If all are longer, the cheapest tier, filled.
        context: tokens of context of all requests together, for the cost model.
        drafting: what the draft computes. "block": R·γ slots. "depth": R·d slots, d the longest window allowed, which
            is then optimised together with K. "windows": exactly the K slots that will be verified, d optimised too.
        block: the block has been run with this length already, so that d is no longer open; None: it has not.
        allow_skip: whether the answer may be to skip drafting, where plain decoding commits as many tokens per second.

    Raises:
        ValueError: survival is empty or not in [0, 1], or `drafting` is unknown.
    """
    values = np.asarray(values)
    _check_question(values, drafting)
    requests, gamma = values.shape[-2:]
    low, high = window_bounds(requests, gamma, min_window, max_window)
    least = 0 if low is None else int(low.max())
    deepest = gamma if high is None else int(high.max())
    limit = np.inf if max_step_seconds is None else max_step_seconds
    shortest = deepest if drafting == "block" or block is not None else least
    best, best_rate = None, -np.inf
    for length in range(max(shortest, 1), deepest + 1):  # none if nobody may be verified
        slots = {"block": requests * gamma, "depth": requests * length, "windows": None}[drafting]
        run = gamma if drafting == "block" else block or length
        choice = _best_at_length(values, cost, low, high, length, context, limit, slots, run)
        if choice.step_seconds <= limit and choice.expected_tokens / choice.step_seconds > best_rate:
            best, best_rate = choice, choice.expected_tokens / choice.step_seconds
        elif best is None:
            best = choice
    plain_seconds = float(cost.step_seconds(requests, requests, context))
    if best is None or (allow_skip and least == 0 and requests / plain_seconds >= best_rate):
        return Budget(0, float(requests), plain_seconds, True, 0)
    return best


def _check_question(values: np.ndarray, drafting: str) -> None:
    if values.ndim not in (2, 3) or values.size == 0:
        raise ValueError(f"survival must be a matrix [requests >= 1, block size >= 1], got shape {values.shape}")
    if drafting not in DRAFTING:
        raise ValueError(f"drafting {drafting!r} is not one of {DRAFTING}")


def _best_at_length(
    values: np.ndarray,
    cost: CostModel,
    low: np.ndarray | None,
    high: np.ndarray | None,
    length: int,
    context: float,
    limit: float,
    slots: int | None,
    run: int,
) -> Budget:
    """The best K when no window is longer than `length`, and the draft computes `slots` slots (None: as many as K) of
    blocks that are `run` long."""
    requests = values.shape[-2]
    base, floor, ladder = _candidates(values, low, high, length)
    least = requests + floor  # rows of the smallest step; K counts from there
    seconds = cost.step_seconds(requests, range(least, least + len(ladder)), context)
    seconds = seconds + cost.draft_seconds(np.arange(floor, floor + len(ladder)) if slots is None else slots, run)
    # Neighbours that cost the same form a tier. Its last K commits most, so only the last ones are compared.
    starts = np.empty(len(ladder) + 1, bool)
    starts[0] = starts[-1] = True
    np.not_equal(seconds[1:], seconds[:-1], out=starts[1:-1])
    edges = starts.nonzero()[0]
    last = edges[1:] - 1
    seconds = seconds[last]
    expected = _sums(ladder, edges) + (requests + base)
    rate = expected / seconds
    if limit < np.inf:
        allowed = seconds <= limit
        rate = np.where(allowed, rate, -np.inf) if allowed.any() else -seconds
    best = rate.argmax()
    return Budget(floor + int(last[best]), float(expected[best]), float(seconds[best]), False, length)


def _candidates(
    values: np.ndarray, low: np.ndarray | None, high: np.ndarray | None, length: int
) -> tuple[float, int, np.ndarray]:
    """Survival that is verified in any case, how many entries that is, and the ladder of the other entries."""
    values = values[..., :length]
    if low is None:
        return 0.0, 0, _ladder(values.ravel(order="K") if values.ndim == 2 else values.reshape(len(values), -1))
    position = np.arange(length)
    forced = position < low[:, None]
    certain = values[..., forced]
    _check_ends(certain.min(initial=0.0), certain.max(initial=0.0))
    base = float(certain.sum(dtype=np.float64)) / (len(values) if values.ndim == 3 else 1)
    return base, int(np.count_nonzero(forced)), _ladder(values[..., ~forced & (position < high[:, None])])


def _ladder(chosen: np.ndarray) -> np.ndarray:
    """What the K-th draft adds, K = 0, 1, ..: zero, then the entries of `chosen` [n] or [H, n] in falling order.

    The entries of several cases are averaged rank by rank. Entries that are zero are left out: they add nothing.
    """
    rising = np.empty((*chosen.shape[:-1], chosen.shape[-1] + 1), chosen.dtype)
    rising[..., -1] = 0.0  # K = 0, at the end because the ladder is read backwards
    entries = rising[..., :-1]
    entries[:] = chosen
    entries.sort()
    if chosen.ndim == 2:
        _check_ends(entries[:, :1].min(initial=0.0), entries[:, -1:].max(initial=0.0))
        rising = rising.mean(axis=0, dtype=np.float64)
    elif len(entries):
        _check_ends(entries[0], entries[-1])
    ladder = rising[::-1]
    return ladder if ladder[-1] > 0 else ladder[: 1 + np.count_nonzero(ladder)]


def _sums(ladder: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Sum of the ladder up to the end of every stretch [edges[i], edges[i+1]), in float64."""
    if len(edges) > len(ladder):  # stretches of one
        return np.add.accumulate(ladder, dtype=np.float64)
    # Adding an entry to its stretch takes a seventh of the time of a step of a running sum.
    return np.add.accumulate(np.add.reduceat(ladder, edges[:-1], dtype=np.float64))


def _check_ends(least: float, most: float) -> None:
    """Refuse survival with these extremes. Sorting and `max` put NaN last, so two comparisons speak for all entries."""
    if not (0.0 <= least and most <= 1.0):
        raise ValueError("survival must lie in [0, 1] and hold no NaN")


def plan_budget(
    evidence: LaggedSurvival | ContextSurvival,
    cost: CostModel,
    *,
    missing: np.ndarray | None = None,
    **options,
) -> Budget:
    """`best_budget` on evidence that cannot anticipate: two steps old, or a function of the context alone.

    Args:
        evidence: a LaggedSurvival (made by the relay) or a ContextSurvival.
        cost: as in `best_budget`.
        missing: [γ] survival for requests without history, commonly the running mean of their position; needed
            only if there are any.
        **options: as in `best_budget`.

    Raises:
        TypeError: the evidence is anything else; a bare array could be today's survival.
        ValueError: a request has no history and `missing` is not given; and as in `best_budget`.
    """
    return best_budget(evidence_values(evidence, missing), cost, **options)


def evidence_values(evidence: LaggedSurvival | ContextSurvival, missing: np.ndarray | None) -> np.ndarray:
    """The survival that the evidence stands for; unknown rows are the request's own mean, or else `missing` [γ].

    Raises:
        TypeError: the evidence is neither a LaggedSurvival nor a ContextSurvival.
        ValueError: a row is missing and nothing is given to replace it.
    """
    if isinstance(evidence, ContextSurvival):
        return evidence.values
    if not isinstance(evidence, LaggedSurvival):
        raise TypeError(
            f"a budget is planned from LaggedSurvival or ContextSurvival, not from {type(evidence).__name__}: "
            "an array could hold survival of the very tokens it decides about"
        )
    if evidence.complete:
        return evidence.values
    empty = evidence.missing
    own = evidence.averaged()
    strangers = own.missing
    if strangers.any():
        if missing is None:
            raise ValueError(f"request {int(np.argmax(strangers))} has no history and no running mean was given")
        own = np.where(strangers[:, None], missing, own.values)
    else:
        own = own.values
    return own if evidence.values.ndim == 2 else np.where(empty[..., None], own, evidence.values)
