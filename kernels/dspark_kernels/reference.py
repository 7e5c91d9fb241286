"""The four acceptance rules for one request on plain Python numbers: the documentation of `accept.py`.

Every function takes p (rows 0 .. w at least, each a list over V), q (one list over V per drafted token), the drafted
tokens x, the window w and the coins, and returns the committed tokens. It works on floats and on `Fraction`s alike.
"""

from __future__ import annotations

from collections.abc import Sequence


def inverse_cdf(weights: Sequence, u) -> int:
    """First index whose cumulative weight exceeds u times the total (u in [0, 1)): never one of weight zero."""
    target, cumulative = u * sum(weights), 0
    for index, weight in enumerate(weights):
        cumulative += weight
        if cumulative > target:
            return index
    raise ValueError("no weight is positive")


def residual(p: Sequence, q: Sequence, scale=1) -> list:
    """(s p - q)+, or p where that has no mass (then s p = q, and the draw cannot be reached but by rounding)."""
    rest = [max(scale * a - b, 0) for a, b in zip(p, q, strict=True)]
    return rest if sum(rest) > 0 else list(p)


def greedy(argmax: Sequence[int], x: Sequence[int], w: int) -> list[int]:
    """`argmax[j]` is the target's argmax at row j. Also the coupled rule, with its argmax(log p + g)."""
    committed = []
    for j in range(w + 1):
        committed.append(argmax[j])
        if j == w or argmax[j] != x[j]:
            return committed


def token(p: Sequence, q: Sequence, x: Sequence[int], w: int, accept: Sequence, final: Sequence) -> list[int]:
    """Leviathan et al. 2023, Algorithm 1; the bonus row w < k is judged on x[w] (a cap truncates what is emitted)."""
    committed = []
    for j in range(w + 1):
        if j == len(x):
            return committed + [inverse_cdf(p[j], final[j])]
        if not accept[j] * q[j][x[j]] < p[j][x[j]]:
            return committed + [inverse_cdf(residual(p[j], q[j]), final[j])]
        committed.append(x[j])
    return committed


def block(p: Sequence, q: Sequence, x: Sequence[int], w: int, accept: Sequence, final: Sequence) -> list[int]:
    """Sun et al. 2024, Algorithm 2, on the block x[:w]."""
    scale, stop, scale_at_stop = 1, 0, 1
    for i in range(1, w + 1):
        scale = min(scale * p[i - 1][x[i - 1]] / q[i - 1][x[i - 1]], 1)
        if i == w:
            threshold = scale
        else:
            mass = sum(max(scale * a - b, 0) for a, b in zip(p[i], q[i], strict=True))
            threshold = mass / (mass + 1 - scale) if mass + 1 - scale > 0 else 1
        if accept[i - 1] < threshold:
            stop, scale_at_stop = i, scale
    last = p[w] if stop == w else residual(p[stop], q[stop], scale_at_stop)
    return list(x[:stop]) + [inverse_cdf(last, final[stop])]


def allocate(survival: Sequence[Sequence[float]], budget: int, low: Sequence[int], high: Sequence[int]) -> list[int]:
    """Windows by the definition: rank every candidate by (-survival, position, request), admit the first ones."""
    low = [min(a, b) for a, b in zip(low, high, strict=True)]
    candidates = sorted(
        (-value, k, r) for r, row in enumerate(survival) for k, value in enumerate(row) if low[r] <= k < high[r]
    )
    windows = list(low)
    for _, _, r in candidates[: max(0, budget - sum(low))]:
        windows[r] += 1
    return windows
