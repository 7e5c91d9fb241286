"""The budget: how many drafted tokens this step may verify, so that most tokens are committed per second."""

from __future__ import annotations

import numpy as np

from .plan import Plan, Terms
from .relay import LaggedSurvival
from .windows import least, most


def reference_budget(survival: np.ndarray, terms: Terms, length: int) -> tuple[int, float]:
    """Algorithm 1 of the paper (§5.2) without its `break`: the best K, and its tokens per second. Plain and slow.

    `best_budget` is the same search over several cases and every draft length at once; a test holds them together.

    Args:
        survival: [R, γ]; entries of 0 are no candidates.
        terms: of the step.
        length: of the longest window.
    """
    requests, high = len(survival), np.minimum(terms.high, length)
    tokens = requests + sum(float(survival[r, k]) for r in range(requests) for k in range(terms.low[r]))
    ranked = sorted(
        (float(survival[r, k]) for r in range(requests) for k in range(terms.low[r], high[r])), reverse=True
    )
    first, best, best_rate = int(terms.low.sum()), 0, 0.0
    for admitted in range(len(ranked) + 1):
        if admitted:
            tokens += ranked[admitted - 1]
        budget = first + admitted
        rate = tokens / float(terms.seconds(range(budget, budget + 1), length)[0])
        if rate > best_rate:
            best, best_rate = budget, rate
    return best, best_rate


def best_budget(cases: np.ndarray, terms: Terms) -> Plan:
    """The K that maximises expected committed tokens per second, over all K (paper §5.2: Algorithm 1 without `break`).

    With the candidates sorted by survival a_(1) >= a_(2) >= ..., verifying the best K commits τ(K) = R + Σ_{i<=K} a_(i)
    tokens in T(K) = step_seconds(R, R + K) + draft_seconds. All K are compared, so a cost curve with jumps cannot trap
    the search, and inside a tier, where T is flat, the last slot wins as long as it adds anything. Unless the draft
    computes whole blocks, its length is optimised together with K. Fed with survival of the tokens it decides about,
    this anticipates: a scheduler calls `plan_budget`.

    Args:
        cases: [H, R, γ], equally likely cases of the survival, R >= 1, non-increasing along rows, no NaN. τ(K) is the
            mean over the cases of what their own best K commit: windows are chosen later, by the survival that will
            really be there.
        terms: of the step. A minimum above zero anywhere forbids skipping the draft: whoever sets it asks for drafting.

    Raises:
        ValueError: survival is empty or not in [0, 1].
    """
    requests, limit = len(terms.low), np.inf if terms.max_step_seconds is None else terms.max_step_seconds
    if cases.ndim != 3 or cases.size == 0 or cases.shape[1:] != (requests, terms.shape.gamma):
        raise ValueError(
            f"survival must be [cases, requests = {requests}, {terms.shape.gamma}], got shape {cases.shape}"
        )
    best, best_rate = None, -np.inf
    for length in terms.lengths:
        tokens, expected, seconds = _best_at_length(cases, terms, length, limit)
        if seconds <= limit and expected / seconds > best_rate:
            best, best_rate = (tokens, expected, seconds, length), expected / seconds
        elif best is None:
            best = tokens, expected, seconds, length
    plain_seconds = terms.plain_seconds
    if best is None or (terms.least == 0 and requests / plain_seconds >= best_rate):
        return terms.plan(0, float(requests), plain_seconds, 0)
    return terms.plan(*best)


def _best_at_length(cases: np.ndarray, terms: Terms, length: int, limit: float) -> tuple[int, float, float]:
    """(K, expected tokens, seconds) of the best K when no window is longer than `length`."""
    base, floor, ladder = _candidates(cases, terms, length)
    seconds = terms.seconds(range(floor, floor + len(ladder)), length)
    # Neighbours that cost the same form a tier. Its last K commits most, so only the last ones are compared.
    starts = np.empty(len(ladder) + 1, bool)
    starts[0] = starts[-1] = True
    np.not_equal(seconds[1:], seconds[:-1], out=starts[1:-1])
    edges = starts.nonzero()[0]
    last = edges[1:] - 1
    seconds = seconds[last]
    expected = _sums(ladder, edges) + (len(terms.low) + base)
    rate = expected / seconds
    if limit < np.inf:
        allowed = seconds <= limit
        rate = np.where(allowed, rate, -np.inf) if allowed.any() else -seconds
    best = rate.argmax()
    return floor + int(last[best]), float(expected[best]), float(seconds[best])


def _candidates(cases: np.ndarray, terms: Terms, length: int) -> tuple[float, int, np.ndarray]:
    """Survival that is verified in any case, how many entries that is, and the ladder of the other entries."""
    cases = cases[..., :length]
    if terms.least == 0 and least(terms.high) >= length:
        # In memory survival lies position by position, so that this needs no copy.
        return 0.0, 0, _ladder(cases.transpose(0, 2, 1).reshape(len(cases), -1))
    position = np.arange(length)
    forced = position < terms.low[:, None]
    certain = cases[:, forced]
    _check_ends(certain.min(initial=0.0), certain.max(initial=0.0))
    base = float(certain.sum(dtype=np.float64)) / len(cases)
    return base, int(np.count_nonzero(forced)), _ladder(cases[:, ~forced & (position < terms.high[:, None])])


def _ladder(chosen: np.ndarray) -> np.ndarray:
    """What the K-th draft adds, K = 0, 1, ..: zero, then the entries of `chosen` [H, n] in falling order.

    The entries of several cases are averaged rank by rank. Entries that are zero are left out: they add nothing.
    """
    rising = np.empty((len(chosen), chosen.shape[1] + 1), chosen.dtype)
    rising[:, -1] = 0.0  # K = 0, at the end because the ladder is read backwards
    entries = rising[:, :-1]
    entries[:] = chosen
    entries.sort()
    if entries.size:
        _check_ends(least(entries[:, 0]), most(entries[:, -1]))
    ladder = (rising[0] if len(rising) == 1 else rising.mean(axis=0, dtype=np.float64))[::-1]
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


def plan_budget(evidence: LaggedSurvival, terms: Terms, mean: np.ndarray) -> Plan:
    """`best_budget` on evidence that cannot anticipate, because it is two steps old.

    Args:
        evidence: made by the relay.
        terms: of the step.
        mean: [γ] survival of requests without history, commonly the running mean of their position.

    Raises:
        TypeError: the evidence is anything else; a bare array could be today's survival.
    """
    if not isinstance(evidence, LaggedSurvival):
        raise TypeError(
            f"a budget is planned from LaggedSurvival, not from {type(evidence).__name__}: "
            "it could hold survival of the very tokens it decides about"
        )
    return best_budget(evidence.filled(mean), terms)
