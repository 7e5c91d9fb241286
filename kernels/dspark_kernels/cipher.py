"""Philox4x32-10: four 32-bit words as a pure function of a key and a counter.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (section 3).
"""

from __future__ import annotations

import torch

MASK32 = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

# The last counter word separates the users of one seed: the verify step's coins, and the keys of the Gumbel hash.
DOMAIN_STEP = 0
DOMAIN_GUMBEL = 1


def philox_reference(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 on Python integers (Salmon et al. 2011). Words are 32-bit, unsigned."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & MASK32, (product0 >> 32) ^ c3 ^ k1, product0 & MASK32
        k0, k1 = (k0 + WEYL[0]) & MASK32, (k1 + WEYL[1]) & MASK32
    return c0, c1, c2, c3


def philox(
    seeds: torch.Tensor, steps: torch.Tensor, indices: torch.Tensor, domain: int = DOMAIN_STEP
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32-10 with key = seed (64 bits) and counter = (step low, step high, index, domain).

    Args:
        seeds, steps, indices: int64, broadcastable against each other; indices below 2**32.
        domain: fourth counter word.
    Returns:
        Four int64 tensors of the broadcast shape, each word in [0, 2**32).
    """
    seeds, steps, indices = torch.broadcast_tensors(seeds, steps, indices)
    # Pairs are stacked, so that a round costs seven small kernels: `even` holds words 0 and 2, `odd` words 1 and 3.
    even = torch.stack((steps & MASK32, indices & MASK32))
    odd = torch.stack(((steps >> 32) & MASK32, torch.full_like(steps, domain)))
    keys = torch.stack((seeds & MASK32, (seeds >> 32) & MASK32))
    multipliers, weyl = (torch.stack([torch.full_like(seeds, x) for x in pair]) for pair in (MULTIPLIERS, WEYL))
    for _ in range(ROUNDS):
        product = (even * multipliers).flip(0)  # wraps modulo 2**64, which keeps all 64 bits
        even = ((product >> 32) & MASK32) ^ odd ^ keys
        odd = product & MASK32
        keys = (keys + weyl) & MASK32
    return even[0], odd[0], even[1], odd[1]
