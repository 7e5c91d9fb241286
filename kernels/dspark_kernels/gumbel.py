"""Seeded noise over the vocabulary for the `coupled` rule, and the plain seeded sampler built on it.

argmax(log p + g) with g = -log E, E = -log(1 - v) is argmax(p / E): the same choice without a logarithm of p, without
minus infinities, and without normalising p. v is a hash of (seed, absolute position, token id), so the token that a
seeded request emits depends on its logits, its seed and the position alone: not on the draft, the window, the
verify mode or the batch. Source: exponential races / Gumbel-max (Maddison et al. 2014); the coupling is
docs/design.md (rules); the mixer is the two-multiplication 32-bit finaliser "lowbias32" (public domain, C. Wellons).
"""

from __future__ import annotations

from functools import lru_cache

import torch

from .backend import HAS_NUMBA, use_triton
from .cipher import DOMAIN_GUMBEL, MASK32, philox, philox_reference
from .sampling import filtered_weights, first_argmax
from .types import SamplingRows

CHUNK_ENTRIES = 1 << 18  # noise is made for this many (row, token) pairs at a time, whatever the batch
RATIO = 18.0  # above E(v) / v for every v: E <= 24 log 2 < 16.64 at the largest v, 1 - 2**-24
MIX = (0x7FEB352D, 0x846CA68B)


def mix32_reference(x: int) -> int:
    """The 32-bit finaliser on Python integers."""
    x ^= x >> 16
    x = x * MIX[0] & MASK32
    x ^= x >> 15
    x = x * MIX[1] & MASK32
    return x ^ x >> 16


def _signed(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x


def _mix32_(x: torch.Tensor) -> torch.Tensor:
    """The finaliser on int32 (wrapping), in place. Arithmetic shifts are masked to be logical ones."""
    x ^= (x >> 16) & 0xFFFF
    x *= MIX[0]
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(MIX[1])
    x ^= (x >> 16) & 0xFFFF
    return x


@lru_cache(maxsize=8)
def _mixed_ids(vocab: int, device: torch.device) -> torch.Tensor:
    """mix32(token id + 1) for every token: int32 [V]. The +1 keeps token 0 off the finaliser's fixed point."""
    return _mix32_(torch.arange(1, vocab + 1, dtype=torch.int32, device=device))


def token_hashes(columns: int, token_ids: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """The hash of each column's token id (int64 [C]; None: the column itself): int32 [C]."""
    return _mixed_ids(columns, device) if token_ids is None else _mix32_((token_ids + 1).to(torch.int32))


def noise_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Two int32 keys per row from (seed, absolute position): int32 [N, 2]."""
    if HAS_NUMBA and seeds.device.type == "cpu":
        from .random_numba import keys_numba

        return keys_numba(seeds, positions)
    return noise_keys_torch(seeds, positions)


def noise_keys_torch(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The torch path of `noise_keys`."""
    word0, word1, _, _ = philox(seeds, positions, torch.zeros_like(seeds), DOMAIN_GUMBEL)
    return torch.stack((word0, word1), dim=-1).to(torch.int32)


def noise_bits(keys: torch.Tensor, mixed_ids: torch.Tensor) -> torch.Tensor:
    """31 hash bits per (row, token), int32 [N, V]: mix32(mixed_id ^ key0) ^ key1 without its sign."""
    bits = mixed_ids ^ keys[:, :1]
    _mix32_(bits)
    bits ^= keys[:, 1:]
    bits &= 0x7FFFFFFF
    return bits


def exponential(bits: torch.Tensor) -> torch.Tensor:
    """E = -log(1 - v), v = (bits + 1/2) / 2**31, float32, strictly positive, exact in relative terms near 0.

    The winners of a race have a small E, so 1 - v alone (24 bits) will not do; log(1-v)·v/((1-v)-1) repairs it
    (Kahan's log1p), and torch's own log1p is ten times slower on a CPU.
    """
    v = bits.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    u = 1.0 - v
    corrected = torch.log(u).mul_(v)
    u -= 1.0
    corrected /= u  # 0/0 where v < 2**-25: there E = v to the last bit
    return torch.where(u == 0.0, v, corrected)


def race_reference(weights: list[float], seed: int, position: int, token_ids: list[int]) -> int:
    """The winning index on Python numbers: argmax of log(weight) + Gumbel(seed, position, token id)."""
    import math

    key = (seed & MASK32, seed >> 32 & MASK32)
    key0, key1, _, _ = philox_reference(key, (position & MASK32, position >> 32 & MASK32, 0, DOMAIN_GUMBEL))
    best, winner = -math.inf, 0
    for index, (weight, token) in enumerate(zip(weights, token_ids, strict=True)):
        bits = (mix32_reference(mix32_reference(token + 1) ^ key0) ^ key1) & 0x7FFFFFFF
        gumbel = -math.log(-math.log1p(-(bits + 0.5) / 2**31))
        if weight > 0 and math.log(weight) + gumbel > best:
            best, winner = math.log(weight) + gumbel, index
    return winner


def race(
    weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Winner of the exponential race in each row: argmax(log weight + g(seed, position, token id)).

    Args:
        weights: float32 [N, C], non-negative, need not be normalised; a zero never wins against a positive weight.
        seeds, positions: int64 [N]; the position is that of the token being drawn.
        token_ids: None when column = token id, else int64 [C]: the token id of each column.
    Returns:
        int64 [N] winning columns, the first of equals.
    """
    if use_triton(weights):
        from .gumbel_triton import race_triton

        return race_triton(weights, seeds, positions, token_ids)
    count, columns = weights.shape
    keys = noise_keys(seeds, positions)
    hashes = token_hashes(columns, token_ids, weights.device)
    winners = torch.empty(count, dtype=torch.int64, device=weights.device)
    step = max(1, CHUNK_ENTRIES // columns)
    for start in range(0, count, step):
        rows = slice(start, start + step)
        winners[rows] = _race(weights[rows], keys[rows], hashes)
    return winners


def _race(weights: torch.Tensor, keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The race of a few rows: [n, C], int32 [n, 2], int32 [C].

    v <= E(v) <= 17 v, so weight / v bounds the score from above and, divided by 17, from below: the logarithm is
    taken only of columns whose upper bound reaches the best lower bound.
    """
    bits = noise_bits(keys, ids)
    upper = weights / bits.to(torch.float32).add_(0.5)
    best = upper.amax(dim=-1, keepdim=True)
    row, column = torch.nonzero(upper >= best / RATIO, as_tuple=True)
    score = weights[row, column] / exponential(bits[row, column])
    top = torch.zeros(len(weights), device=score.device).scatter_reduce_(0, row, score, "amax")
    won = score == top[row]
    winner = torch.full((len(weights),), weights.shape[1] - 1, device=score.device)
    return winner.scatter_reduce_(0, row[won], column[won], "amin")


def seeded_sample(
    logits: torch.Tensor, rows: SamplingRows, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """The plain seeded sampler: argmax(log p + g(seed, position, token id)), p after the filters.

    The law that seeded requests have everywhere: prefill, plain decoding, and the `coupled` rule's verification.

    Args:
        logits: [N, V]; rows: N parameters (greedy rows give their argmax).
        seeds: int64 [N]; positions: int64 [N], absolute position of the token that is drawn.
    Returns:
        int64 [N] token ids.
    """
    if rows.all_greedy:
        return first_argmax(logits)
    return race(filtered_weights(logits, rows), seeds, positions)
