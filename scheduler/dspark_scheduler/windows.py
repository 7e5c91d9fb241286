"""Windows: which drafted tokens are verified, given how many may be."""

from __future__ import annotations

import numpy as np


def allocate_windows(
    survival: np.ndarray,
    budget: int,
    *,
    min_window: int | np.ndarray = 0,
    max_window: int | np.ndarray | None = None,
) -> np.ndarray:
    """Give the `budget` drafts with the highest survival to the verifier (paper, §5.2: the top K of all requests).

    Ties go to the lower position, then to the lower row. Since survival never rises along a row, the entries chosen
    are a prefix of every row, so a window is one number.

    Non-anticipation: (r, k) is chosen iff fewer than K entries rank above it. An entry (r, j) with j > k never does,
    whatever its value: its survival is at most that of (r, k), and on a tie its position is the later one. So for a
    given K the choice is a function of the row's entries up to k and of the other rows, and nothing that is sampled
    at k or later in this request can move it.

    Args:
        survival: [R, γ] floats in [0, 1], non-increasing along every row.
        budget: drafts to verify in all, minimum windows included. Below the sum of the minimum windows it counts as
            that sum; above the sum of the maximum windows, as that one.
        min_window: drafts that are verified whatever their survival; a number or one per request [R].
        max_window: drafts that are verified at most; a number or one per request [R]. None is γ. A request for which
            drafting is switched off has 0. Where it is below the minimum, the maximum holds.

    Returns:
        [R] int64 windows w, 0 <= w <= γ, with sum(w) == min(max(budget, sum of minima), sum of maxima).

    Raises:
        ValueError: not a matrix, NaN, or a row that rises.
    """
    survival = np.asarray(survival)
    if survival.ndim != 2:
        raise ValueError(f"survival must be a matrix [requests, block size], got shape {survival.shape}")
    positions = np.ascontiguousarray(survival.T)  # [γ, R]: what follows runs over all requests of a position at once
    gamma, requests = positions.shape
    # A comparison with NaN is false, so one pass finds a NaN too, unless there is nothing to compare with.
    falls = positions[1:] <= positions[:-1]
    if np.count_nonzero(falls) < falls.size or (gamma == 1 and np.isnan(positions).any()):
        raise ValueError("survival must be free of NaN and never rise along a row")
    bounds = window_bounds(requests, gamma, min_window, max_window)
    if bounds is None:
        budget = min(int(budget), positions.size)
        return _top(positions, budget) if budget > 0 else np.zeros(requests, np.int64)
    low, high = bounds
    budget = min(int(budget) - int(low.sum()), int((high - low).sum()))
    if budget <= 0:
        return low.copy()
    # Outside the bounds there is nothing to rank: -1 is below every probability.
    position = np.arange(gamma)[:, None]
    return low + _top(np.where((position >= low) & (position < high), positions, -1.0), budget)


def _top(candidates: np.ndarray, count: int) -> np.ndarray:
    """How many of the `count` (>= 1) best entries of `candidates` [γ, R] each request holds, [R] int64.

    In memory the entries lie in the order in which ties are broken: by position, then by row.
    """
    ranked, place = candidates.flatten(), candidates.size - count
    ranked.partition(place)
    threshold = ranked[place]
    admitted = candidates >= threshold
    counts = np.add.reduce(admitted, axis=0, dtype=np.int64)
    surplus = np.count_nonzero(admitted) - count
    if surplus:  # ties at the threshold: the last ones stay out
        tied = np.flatnonzero(candidates == threshold)[-surplus:]
        counts -= np.bincount(tied % len(counts), minlength=len(counts))
    return counts


def window_bounds(
    requests: int, gamma: int, min_window: int | np.ndarray, max_window: int | np.ndarray | None
) -> tuple[np.ndarray, np.ndarray] | None:
    """Bounds as two int64 arrays [R] with 0 <= low <= high <= gamma, or None if they bind nowhere.

    Raises:
        ValueError: a bound is negative, or has neither no dimension nor one entry per request.
    """
    if max_window is None:
        max_window = gamma
    numbers = isinstance(min_window, (int, np.integer)) and isinstance(max_window, (int, np.integer))
    if numbers and min_window == 0 and max_window >= gamma:
        return None
    low = per_request(min_window, requests, "min_window")
    high = np.minimum(per_request(max_window, requests, "max_window"), gamma)
    if not np.count_nonzero(low) and (requests == 0 or least(high) == gamma):
        return None
    return np.minimum(low, high), high


def per_request(bound: int | np.ndarray, requests: int, name: str) -> np.ndarray:
    """A bound as int64 [R]; raises ValueError if it is negative, or neither a number nor one per request."""
    values = np.asarray(bound)
    if values.ndim == 0:
        values = np.full(requests, bound)
    if values.shape != (requests,) or (requests and least(values) < 0):
        raise ValueError(f"{name} must be a number >= 0 or one per request [{requests}], got {bound!r}")
    return values.astype(np.int64, copy=False)


# numpy finds the place of an extreme much faster than the extreme itself (NaN counts as either).
def least(values: np.ndarray) -> int | float:
    """The smallest of `values` [n >= 1]."""
    return values.item(values.argmin())


def most(values: np.ndarray) -> int | float:
    """The largest of `values` [n >= 1]."""
    return values.item(values.argmax())
