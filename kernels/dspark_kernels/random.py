"""Counter-based random numbers: Philox4x32-10 keyed by (request seed; step, index, purpose).

A number is a pure function of its key, so nothing drawn for a request depends on the rest of the batch, ranks agree
without a broadcast, and no number is drawn twice as long as the step counter of a request never repeats. One call of
the cipher gives four 32-bit words, from which the three purposes take disjoint bits:

    draft draw    words 0 and 3 (low half)     48 bits   which token the draft proposes at this index
    accept coin   word 1                       32 bits   whether the token at this index is accepted
    final draw    words 2 and 3 (high half)    48 bits   the residual or bonus token, index = where the block stops

Gumbel noise for the `coupled` rule is the only noise keyed by absolute position: see `gumbel.py`.
"""

from __future__ import annotations

import torch

from .backend import HAS_NUMBA, use_triton
from .cipher import philox
from .types import Coins, RequestRules, StepNoise


def unit_interval(high: torch.Tensor, low16: torch.Tensor | None = None) -> torch.Tensor:
    """A 32-bit word, and optionally 16 more bits, as float64 in [0, 1): exact, so 1.0 never occurs."""
    if low16 is None:
        return high.to(torch.float64) * 2.0**-32
    return (high * 65536 + low16).to(torch.float64) * 2.0**-48


def draw_coins(seeds: torch.Tensor, steps: torch.Tensor, block_size: int) -> Coins:
    """All coins of one verify step of a block of `block_size` drafts.

    Args:
        seeds: int64 [R] request seeds.
        steps: int64 [R] each request's own count of verify steps; must never repeat for one request.
        block_size: γ.
    Source: docs/design.md (noise); the cipher is Philox4x32-10.
    """
    if use_triton(seeds):
        from .random_triton import coins_triton

        return Coins(*coins_triton(seeds, steps, block_size + 1))
    if HAS_NUMBA and seeds.device.type == "cpu":
        from .random_numba import coins_numba

        return Coins(*coins_numba(seeds, steps, block_size + 1))
    return draw_coins_torch(seeds, steps, block_size)


def draw_coins_torch(seeds: torch.Tensor, steps: torch.Tensor, block_size: int) -> Coins:
    """The torch path of `draw_coins`."""
    index = torch.arange(block_size + 1, dtype=torch.int64, device=seeds.device)
    word0, word1, word2, word3 = philox(seeds[:, None], steps[:, None], index[None, :])
    return Coins(
        draft=unit_interval(word0, word3 & 0xFFFF),
        accept=unit_interval(word1),
        final=unit_interval(word2, word3 >> 16),
    )


def draw_noise(
    seeds: torch.Tensor, steps: torch.Tensor, positions: torch.Tensor, block_size: int, rules: RequestRules
) -> StepNoise:
    """All randomness of one verify step; draw it once per step, before drafting.

    Args:
        seeds, steps, positions: int64 [R]. `steps` counts the request's own verify steps and must never repeat for a
            request (retraction included): noise is spent once.
        block_size: γ, at least the number of tokens that will be drafted. rules: the requests' own.
    """
    coins = draw_coins(seeds, steps, block_size) if rules.need_coins else None
    return StepNoise(seeds, positions, rules, coins)
