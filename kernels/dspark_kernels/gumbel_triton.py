"""Triton kernels of `gumbel.py`: the seeded race over a row."""

from __future__ import annotations

import torch

from .backend import jit, tl
from .random_triton import high_word, low_word, mix32
from .sampling_triton import block_for, dense_rows


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
    w_ptr, ids_ptr, seed_ptr, position_ptr, out_ptr, C, w_stride, HAS_IDS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    seed = tl.load(seed_ptr + row)
    position = tl.load(position_ptr + row)
    w_row = w_ptr + row.to(tl.int64) * w_stride
    winner = row_race(w_row, ids_ptr, C, seed, position, HAS_IDS, BLOCK)
    tl.store(out_ptr + row, winner.to(tl.int64))


def race_triton(
    weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor | None
) -> torch.Tensor:
    """As `gumbel.race`: int64 [N] winning columns."""
    weights = dense_rows(weights)
    count, columns = weights.shape
    out = torch.empty(count, dtype=torch.int64, device=weights.device)
    race_kernel[(count,)](
        weights, weights if token_ids is None else token_ids, seeds.contiguous(), positions.contiguous(), out, columns,
        weights.stride(0),
        HAS_IDS=token_ids is not None, BLOCK=min(1024, block_for(columns)), num_warps=8,
    )  # fmt: skip
    return out
