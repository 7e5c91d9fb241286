"""Triton kernels of `sampling.py`: the law of a row without a sort, its argmax, and one draw. One program per row.

The smallest kept probability is found by bisecting the bit pattern of a non-negative float32 (31 halvings, exact), so
top-k and top-p need neither a sort nor a buffer beyond the output.
"""

from __future__ import annotations

import torch

from .backend import jit, tl
from .requests import RequestTensors
from .types import SamplingRows

BLOCK = 4096
SKIP, NORMALISED, RAW = 0, 1, 2  # what the law kernel does with a row


@jit
def clean(x):
    """NaN is a masked token, +inf the largest float32."""
    x = x.to(tl.float32)
    x = tl.where(x != x, float("-inf"), x)  # noqa: PLR0124 - true of a NaN alone
    return tl.minimum(x, 3.4028234663852886e38)


@jit
def row_argmax(row_ptr, V, BLOCK: tl.constexpr):
    """(maximum, first argmax) of a row of cleaned logits; (-inf, 0) if every token is masked."""
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        offsets = start + lanes
        x = clean(tl.load(row_ptr + offsets, mask=offsets < V, other=float("-inf")))
        better = x > best
        best = tl.where(better, x, best)
        where = tl.where(better, offsets, where)
    top = tl.max(best, axis=0)
    first = tl.min(tl.where(best == top, where, 2147483647), axis=0)
    return top, tl.where(top == float("-inf"), 0, first)


@jit
def above(p_ptr, V, threshold, BLOCK: tl.constexpr):
    """(count, mass) of the entries of a row that exceed the threshold."""
    lanes = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        offsets = start + lanes
        p = tl.load(p_ptr + offsets, mask=offsets < V, other=0.0)
        inside = p > threshold
        count += inside.to(tl.int32)
        mass += tl.where(inside, p, 0.0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@jit
def smallest_kept(p_ptr, V, top_k, top_p, largest, BLOCK: tl.constexpr):
    """(value, ties): a token is kept if it exceeds `value`, or is among the first `ties` that equal it."""
    low = 0
    high = largest.to(tl.int32, bitcast=True)
    for _ in range(31):
        middle = low + (high - low) // 2
        count, mass = above(p_ptr, V, middle.to(tl.float32, bitcast=True), BLOCK)
        keeps = (count < top_k) & ((top_p >= 1.0) | (mass <= top_p))
        high = tl.where(keeps, middle, high)
        low = tl.where(keeps, low, tl.minimum(middle + 1, high))
    value = high.to(tl.float32, bitcast=True)
    count, mass = above(p_ptr, V, value, BLOCK)
    ties = (top_k - count).to(tl.float32)
    by_mass = tl.floor((top_p - mass) / tl.maximum(value, 1e-37)) + 1.0
    ties = tl.where(top_p < 1.0, tl.minimum(ties, by_mass), ties)
    return value, tl.maximum(tl.minimum(ties, 1e9), 1.0).to(tl.int32)


@jit
def keep(p_ptr, V, value, ties, floor, BLOCK: tl.constexpr):
    """Zero, in place, what is not kept; return the mass that is."""
    lanes = tl.arange(0, BLOCK)
    kept_mass = tl.zeros([BLOCK], tl.float32)
    seen = 0
    for start in range(0, V, BLOCK):
        offsets = start + lanes
        p = tl.load(p_ptr + offsets, mask=offsets < V, other=0.0)
        equal = (p == value).to(tl.int32)
        rank = seen + tl.cumsum(equal, axis=0)
        kept = ((p > value) | ((equal != 0) & (rank <= ties))) & (p >= floor)
        p = tl.where(kept, p, 0.0)
        tl.store(p_ptr + offsets, p, mask=offsets < V)
        kept_mass += p
        seen += tl.sum(equal, axis=0)
    return tl.sum(kept_mass, axis=0)


@jit
def law_kernel(
    logits_ptr, out_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, greedy_ptr, request_ptr, source_ptr, mode_ptr,
    V, logits_stride, out_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[row] = the law of logits[source[row]] under the parameters of request[row]; mode[row] is SKIP, NORMALISED or RAW."""
    row = tl.program_id(0)
    mode = tl.load(mode_ptr + row)
    if mode != 0:
        request = tl.load(request_ptr + row)
        logits_row = logits_ptr + tl.load(source_ptr + row) * logits_stride
        out_row = out_ptr + row.to(tl.int64) * out_stride
        lanes = tl.arange(0, BLOCK)
        top, first = row_argmax(logits_row, V, BLOCK)
        if (tl.load(greedy_ptr + request) != 0) | (top == float("-inf")):
            for start in range(0, V, BLOCK):
                offsets = start + lanes
                tl.store(out_row + offsets, tl.where(offsets == first, 1.0, 0.0), mask=offsets < V)
        else:
            temperature = tl.load(temperature_ptr + request)
            z = tl.zeros([BLOCK], tl.float32)
            for start in range(0, V, BLOCK):
                offsets = start + lanes
                x = clean(tl.load(logits_row + offsets, mask=offsets < V, other=float("-inf")))
                z += tl.exp((x - top) / temperature)
            total = tl.sum(z, axis=0)
            for start in range(0, V, BLOCK):
                offsets = start + lanes
                x = clean(tl.load(logits_row + offsets, mask=offsets < V, other=float("-inf")))
                tl.store(out_row + offsets, tl.exp((x - top) / temperature) / total, mask=offsets < V)
            top_k = tl.minimum(tl.load(top_k_ptr + request), V).to(tl.int32)
            top_p = tl.load(top_p_ptr + request)
            min_p = tl.load(min_p_ptr + request)
            if (top_k < V) | (top_p < 1.0) | (min_p > 0.0):
                tl.debug_barrier()
                largest = 1.0 / total
                value, ties = smallest_kept(out_row, V, top_k, top_p, largest, BLOCK)
                kept = keep(out_row, V, value, ties, largest * min_p, BLOCK)
                if mode == 1:
                    tl.debug_barrier()
                    for start in range(0, V, BLOCK):
                        offsets = start + lanes
                        p = tl.load(out_row + offsets, mask=offsets < V, other=0.0)
                        tl.store(out_row + offsets, p / kept, mask=offsets < V)


@jit
def argmax_kernel(x_ptr, out_ptr, V, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    _, first = row_argmax(x_ptr + row.to(tl.int64) * stride, V, BLOCK)
    tl.store(out_ptr + row, first.to(tl.int64))


@jit
def row_draw(w_ptr, V, uniform, BLOCK: tl.constexpr):
    """First column whose cumulative weight exceeds uniform x total, never one of weight zero (0 if all are)."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([1], tl.float64)
    for start in range(0, V, BLOCK):
        offsets = start + lanes
        total += tl.sum(tl.load(w_ptr + offsets, mask=offsets < V, other=0.0).to(tl.float64), axis=0)
    target = tl.sum(total, axis=0) * uniform
    before = target * 0.0
    drawn = -1
    last = 0
    for start in range(0, V, BLOCK):
        offsets = start + lanes
        w = tl.load(w_ptr + offsets, mask=offsets < V, other=0.0)
        after = before + tl.sum(w.to(tl.float64), axis=0)
        if (drawn < 0) & (after > before):
            last = tl.max(tl.where(w > 0.0, offsets, -1), axis=0)
            if after > target:
                cumulative = before + tl.cumsum(w.to(tl.float64), axis=0)
                first = tl.min(tl.where((cumulative > target) & (w > 0.0), offsets, 2147483647), axis=0)
                drawn = tl.minimum(first, last)
        before = after
    return tl.where(drawn < 0, last, drawn)


@jit
def draw_kernel(w_ptr, uniform_ptr, out_ptr, V, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    drawn = row_draw(w_ptr + row.to(tl.int64) * stride, V, tl.load(uniform_ptr + row), BLOCK)
    tl.store(out_ptr + row, drawn.to(tl.int64))


def block_for(columns: int) -> int:
    """Lanes per program: a power of two, no wider than a row needs."""
    return min(BLOCK, max(16, 1 << (columns - 1).bit_length()))


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """The same values with neighbouring columns next to each other (rows may lie anywhere)."""
    return x if x.stride(-1) == 1 else x.contiguous()


def law_triton(
    logits: torch.Tensor,
    rows: SamplingRows | RequestTensors,
    normalise: bool,
    request: torch.Tensor | None = None,
    mode: torch.Tensor | None = None,
    source: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `probabilities` (or `filtered_weights`): float32 [N, V].

    Args:
        request: int64 [N], which of `rows` governs each row; None if they correspond one to one.
        mode: int32 [N] of SKIP, NORMALISED, RAW; None is one of the latter two for all. Skipped rows stay unwritten.
        source: int64 [N], which row of logits each law is of; None if they correspond one to one.
        out: where to write; its rows may lie apart.
    """
    logits = dense_rows(logits)
    vocab, device = logits.shape[1], logits.device
    count = len(logits) if source is None else len(source)
    out = torch.empty(count, vocab, dtype=torch.float32, device=device) if out is None else out
    every = torch.arange(count, device=device) if request is None or source is None else None
    if mode is None:
        mode = torch.full((count,), NORMALISED if normalise else RAW, dtype=torch.int32, device=device)
    law_kernel[(count,)](
        logits, out, rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.greedy.view(torch.uint8),
        every if request is None else request, every if source is None else source, mode,
        vocab, logits.stride(0), out.stride(0), BLOCK=block_for(vocab), num_warps=8,
    )  # fmt: skip
    return out


def argmax_triton(logits: torch.Tensor) -> torch.Tensor:
    """First argmax of [N, V], NaN the smallest: int64 [N]."""
    logits = dense_rows(logits)
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    vocab = logits.shape[1]
    argmax_kernel[(len(out),)](logits, out, vocab, logits.stride(0), BLOCK=block_for(vocab), num_warps=8)
    return out


def draw_triton(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """As `draw`: int64 [N]."""
    weights = dense_rows(weights)
    out = torch.empty(weights.shape[0], dtype=torch.int64, device=weights.device)
    vocab = weights.shape[1]
    draw_kernel[(len(out),)](
        weights, uniforms.contiguous(), out, vocab, weights.stride(0), BLOCK=block_for(vocab), num_warps=8
    )
    return out
