"""Top-k, top-p and min-p on a CPU without sorting the vocabulary.

A row is cut into blocks; the largest value of each block tells which blocks can hold a token above a floor. Only the
tokens above the floor are sorted, if what the floor leaves out could not have been kept; there the decisions are
SGLang's float32 comparisons on the same prefix of the same sorted order. A row too flat for that is bisected by mass,
which may move the boundary of top-p by the rounding of one float32 sum.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

BLOCK = 64
FLOORS = (1e-3, 1e-4)  # probabilities above which a nucleus usually lies; a flatter row is bisected instead
MARGIN = 1e-6  # of mass, covers the rounding of float32 sums


def filter_rows(p: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Zero what the filters remove; what they keep stays as it is.

    Args:
        p: float32 [n, V], rows summing to 1. top_k: int64 [n] >= 1; top_p: float32 [n] (>= 1 is off);
        min_p: float32 [n] (0 is off).
    Returns:
        float32 [n, V].
    Source: SGLang's order (softmax, top-k and top-p jointly on the sorted row, min-p against the largest); equal
    probabilities in the order of their token ids.
    """
    maxima = _block_maxima(p)
    bound = _bound(p, maxima, top_k, top_p, min_p)
    result = torch.zeros_like(p)
    pending = torch.arange(p.shape[0], device=p.device)
    for floor in FLOORS:
        threshold = torch.clamp(bound[pending], min=floor)
        values, tokens = _candidates(p, maxima, pending, threshold)
        # A running sum adds from left to right: neither the padding nor the number of rows (torch parts a lone wide row
        # among its threads) can move the decision.
        mass = F.pad(values, (1, 0)).cumsum(dim=-1)[:, -1]
        complete = (threshold == bound[pending]) | (mass > top_p[pending] + MARGIN)
        done = pending[complete]
        kept = keep(values[complete], top_k[done], top_p[done], min_p[done])
        # Padding is token 0 with value 0: adding it changes nothing.
        result[done] = result[done].scatter_add_(1, tokens[complete], kept)
        pending = pending[~complete]
        if not pending.numel():
            return result
    for row in pending.tolist():
        result[row] = _bisect_row(p[row], float(bound[row]), int(top_k[row]), float(top_p[row]), float(min_p[row]))
    return result


def _bisect_row(p: torch.Tensor, low: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """One flat row [V]: find a narrow bracket around the smallest kept value, and sort only that.

    Everything above `high` is kept, nothing at or below `low` can be (or, at the start, `low` is under the bound).
    """
    largest = p.amax()
    low, high = math.log2(low) - 1e-3 if low > 0 else -126.0, float(largest.log2()) + 1e-3
    above, before = 0, 0.0  # count and mass of what is above `high`
    for _ in range(14):
        middle = (low + high) / 2
        mass = float(F.threshold(p, 2.0**middle, 0.0).sum())
        count = int((p > 2.0**middle).sum()) if top_k < p.shape[0] else 0
        if mass > top_p + MARGIN or count > top_k:
            low = middle
        elif mass <= top_p - MARGIN:
            high, above, before = middle, count, mass
        else:
            break  # as close as float32 sums can tell
    inside = torch.nonzero((p > 2.0**low) & (p <= 2.0**high))[:, 0]
    ranked, order = torch.sort(p[inside], descending=True, stable=True)
    kept = torch.arange(above, above + len(ranked), device=p.device) < top_k
    if top_p < 1:
        kept &= before + (ranked.cumsum(0) - ranked) <= top_p
    filtered = F.threshold(p, 2.0**high, 0.0)
    filtered[inside[order[kept]]] = ranked[kept]
    return torch.where(filtered >= largest * min_p, filtered, 0.0)


def _block_maxima(p: torch.Tensor) -> torch.Tensor:
    """Largest value of every block of BLOCK tokens (the last may be shorter): [n, blocks]."""
    rows, vocab = p.shape
    whole = vocab - vocab % BLOCK
    maxima = p[:, :whole].reshape(rows, whole // BLOCK, BLOCK).amax(dim=-1)
    if whole == vocab:
        return maxima
    return torch.cat((maxima, p[:, whole:].amax(dim=-1, keepdim=True)), dim=-1)


def _bound(
    p: torch.Tensor, maxima: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """[n] a value that no kept token is below.

    min-p: its own threshold. top-k: the k-th largest block maximum, since k tokens are at least that large. top-p:
    tokens below (1 - top_p) / V hold less than 1 - top_p together, so those above hold more than top_p.
    """
    bound = maxima.amax(dim=-1) * min_p
    if bool((top_p < 1).any()):
        bound = torch.maximum(bound, (1 - top_p).clamp(min=0.0) / (2 * p.shape[1]))
    blocks = maxima.shape[1]
    if bool((top_k <= blocks).any()):
        largest = int(torch.where(top_k <= blocks, top_k, 1).max())
        leading = torch.topk(maxima, largest, dim=-1).values
        kth = leading.gather(1, top_k.clamp(max=largest)[:, None] - 1)[:, 0]
        bound = torch.where(top_k <= blocks, torch.maximum(bound, kth), bound)
    return bound


def _candidates(
    p: torch.Tensor, maxima: torch.Tensor, rows: torch.Tensor, threshold: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of `rows` with p >= threshold, in the order of their ids, padded: (values, int64 tokens), [r, widest]."""
    row, block = torch.nonzero(maxima[rows] >= threshold[:, None], as_tuple=True)
    token = (block[:, None] * BLOCK + torch.arange(BLOCK, device=p.device)).clamp_(max=p.shape[1] - 1)
    value = p[rows[row][:, None], token]
    inside = value >= threshold[row][:, None]
    if p.shape[1] % BLOCK:  # the clamp above repeats the last token
        inside[:, 1:] &= token[:, 1:] != token[:, :-1]
    hit, offset = torch.nonzero(inside, as_tuple=True)
    row, token, value = row[hit], token[hit, offset], value[hit, offset]
    counts = torch.bincount(row, minlength=len(rows))
    column = torch.arange(len(row), device=p.device) - (torch.cumsum(counts, 0) - counts)[row]
    values = torch.zeros(len(rows), max(1, int(counts.max())), device=p.device)
    tokens = torch.zeros(values.shape, dtype=torch.int64, device=p.device)
    values[row, column] = value
    tokens[row, column] = token
    return values, tokens


def keep(values: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Zero the candidates [r, c] that the filters remove; each row's are in the order of their token ids."""
    ranked, order = torch.sort(values, dim=-1, descending=True, stable=True)
    kept = torch.arange(ranked.shape[1], device=values.device) < top_k[:, None]
    before = ranked.cumsum(dim=-1) - ranked
    kept &= (before <= top_p[:, None]) | (top_p >= 1)[:, None]
    kept &= ranked >= ranked[:, :1] * min_p[:, None]
    return torch.zeros_like(values).scatter_(1, order, torch.where(kept, ranked, 0.0))
