"""Triton kernels of `random.py` and `gumbel.py`: coins of a step, and the seeded race over a row."""

from __future__ import annotations

import torch

from .backend import jit, tl
from .sampling_triton import block_for, dense_rows


@jit
def mix32(x):
    """The 32-bit finaliser (uint32)."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@jit
def low_word(x):
    return (x & 0xFFFFFFFF).to(tl.uint32)


@jit
def high_word(x):
    return ((x >> 32) & 0xFFFFFFFF).to(tl.uint32)


@jit
def coins_kernel(seed_ptr, step_ptr, draft_ptr, accept_ptr, final_ptr, N, BLOCK: tl.constexpr):
    """The three uniforms of every index 0 .. N-1 of one request: float64 in [0, 1)."""
    request = tl.program_id(0)
    seed = tl.load(seed_ptr + request)
    step = tl.load(step_ptr + request)
    index = tl.arange(0, BLOCK)
    zero = index * 0
    word0, word1, word2, word3 = tl.philox(
        seed, zero.to(tl.uint32) + low_word(step), zero.to(tl.uint32) + high_word(step), index.to(tl.uint32),
        zero.to(tl.uint32),
    )  # fmt: skip
    out = request * N + index
    draft = word0.to(tl.int64) * 65536 + (word3 & 0xFFFF).to(tl.int64)
    final = word2.to(tl.int64) * 65536 + (word3 >> 16).to(tl.int64)
    tl.store(draft_ptr + out, draft.to(tl.float64) * 3.552713678800501e-15, mask=index < N)
    tl.store(accept_ptr + out, word1.to(tl.int64).to(tl.float64) * 2.3283064365386963e-10, mask=index < N)
    tl.store(final_ptr + out, final.to(tl.float64) * 3.552713678800501e-15, mask=index < N)


@jit
def exponential_of(bits):
    """E = -log(1 - v), v = (bits + 1/2) / 2**31: as `gumbel.exponential`."""
    v = tl.minimum((bits.to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10, 1.0 - 5.960464477539063e-08)
    u = 1.0 - v
    lost = u - 1.0
    corrected = tl.log(u) * v / tl.where(lost == 0.0, 1.0, lost)
    return tl.where(lost == 0.0, v, corrected)


@jit
def row_race(w_ptr, ids_ptr, C, seed, position, HAS_IDS: tl.constexpr, BLOCK: tl.constexpr):
    """First column that maximises weight / E(seed, position, token id)."""
    zero = tl.zeros([1], tl.uint32)
    word0, word1, _, _ = tl.philox(seed, zero + low_word(position), zero + high_word(position), zero, zero + 1)
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -1.0, tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    for start in range(0, C, BLOCK):
        columns = start + lanes
        w = tl.load(w_ptr + columns, mask=columns < C, other=-1.0)
        token = columns
        if HAS_IDS:
            token = tl.load(ids_ptr + columns, mask=columns < C, other=0).to(tl.int32)
        bits = (mix32(mix32((token + 1).to(tl.uint32)) ^ word0) ^ word1) & 0x7FFFFFFF
        score = w / exponential_of(bits)
        better = (score > best) & (columns < C)
        best = tl.where(better, score, best)
        where = tl.where(better, columns, where)
    top = tl.max(best, axis=0)
    return tl.min(tl.where(best == top, where, 2147483647), axis=0)


@jit
def race_kernel(
    w_ptr, ids_ptr, seed_ptr, position_ptr, out_ptr, C, w_stride, ids_stride, HAS_IDS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    seed = tl.load(seed_ptr + row)
    position = tl.load(position_ptr + row)
    w_row = w_ptr + row.to(tl.int64) * w_stride
    ids_row = ids_ptr + row.to(tl.int64) * ids_stride
    winner = row_race(w_row, ids_row, C, seed, position, HAS_IDS, BLOCK)
    tl.store(out_ptr + row, winner.to(tl.int64))


def coins_triton(seeds: torch.Tensor, steps: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """(draft, accept, final) uniforms, float64 [R, count] each."""
    draft, accept, final = torch.empty(3, len(seeds), count, dtype=torch.float64, device=seeds.device)
    coins_kernel[(len(seeds),)](
        seeds.contiguous(), steps.contiguous(), draft, accept, final, count, BLOCK=1 << max(0, count - 1).bit_length()
    )
    return draft, accept, final


def race_triton(
    weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor | None
) -> torch.Tensor:
    """As `gumbel.race`: int64 [N] winning columns."""
    weights = dense_rows(weights)
    count, columns = weights.shape
    out = torch.empty(count, dtype=torch.int64, device=weights.device)
    ids = weights if token_ids is None else dense_rows(token_ids)
    race_kernel[(count,)](
        weights, ids, seeds.contiguous(), positions.contiguous(), out, columns, weights.stride(0),
        0 if token_ids is None or token_ids.dim() == 1 else ids.stride(0),
        HAS_IDS=token_ids is not None, BLOCK=min(1024, block_for(columns)), num_warps=8,
    )  # fmt: skip
    return out
