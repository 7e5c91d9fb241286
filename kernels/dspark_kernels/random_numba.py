"""The numbers of `random.py` and `gumbel.py` on a CPU: one compiled loop instead of a hundred small torch calls.

Bit for bit what torch computes, and stateless: whoever asks for the coins of a step gets the same, however often.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from numba import uint64

from .cipher import DOMAIN_GUMBEL, DOMAIN_STEP, MASK32, MULTIPLIERS, ROUNDS, WEYL


@numba.njit(inline="always")
def _philox(seed, step, index, domain):
    """`cipher.philox` of one key and counter, all uint64."""
    mask, half = uint64(MASK32), uint64(32)
    k0, k1 = seed & mask, seed >> half
    c0, c1, c2, c3 = step & mask, step >> half, index, domain
    for _ in range(ROUNDS):
        a, b = uint64(MULTIPLIERS[0]) * c0, uint64(MULTIPLIERS[1]) * c2
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ k0, b & mask, (a >> half) ^ c3 ^ k1, a & mask
        k0, k1 = (k0 + uint64(WEYL[0])) & mask, (k1 + uint64(WEYL[1])) & mask
    return c0, c1, c2, c3


@numba.njit(cache=True)
def _coins(seeds, steps, out):
    low16, sixteen = uint64(0xFFFF), uint64(16)
    for r in range(out.shape[1]):
        for i in range(out.shape[2]):
            w0, w1, w2, w3 = _philox(seeds[r], steps[r], uint64(i), uint64(DOMAIN_STEP))
            out[0, r, i] = np.float64((w0 << sixteen) | (w3 & low16)) * 2.0**-48
            out[1, r, i] = np.float64(w1) * 2.0**-32
            out[2, r, i] = np.float64((w2 << sixteen) | (w3 >> sixteen)) * 2.0**-48


@numba.njit(cache=True)
def _keys(seeds, positions, out):
    for r in range(out.shape[0]):
        w0, w1, _, _ = _philox(seeds[r], positions[r], uint64(0), uint64(DOMAIN_GUMBEL))
        out[r, 0], out[r, 1] = np.uint32(w0), np.uint32(w1)


def coins_numba(seeds: torch.Tensor, steps: torch.Tensor, count: int) -> torch.Tensor:
    """(draft, accept, final) uniforms, float64 [3, R, count], from int64 [R] seeds and steps."""
    out = torch.empty(3, len(seeds), count, dtype=torch.float64)
    _coins(_words(seeds), _words(steps), out.numpy())
    return out


def keys_numba(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The two Gumbel keys of each (seed, position), int32 [N, 2]."""
    out = torch.empty(len(seeds), 2, dtype=torch.int32)
    _keys(_words(seeds), _words(positions), out.numpy().view(np.uint32))
    return out


def _words(values: torch.Tensor) -> np.ndarray:
    return values.contiguous().numpy().view(np.uint64)
