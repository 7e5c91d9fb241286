"""Counter-based random numbers: Philox4x32-10 keyed by (request seed; step, index, purpose).

A number is a pure function of its key, so nothing drawn for a request depends on the rest of the batch, ranks agree
without a broadcast, and no number is drawn twice as long as the step counter of a request never repeats. One call of
the cipher gives four 32-bit words, from which the three purposes take disjoint bits:

    draft draw    words 0 and 3 (low half)     48 bits   which token the draft proposes at this index
    accept coin   word 1                       32 bits   whether the token at this index is accepted
    final draw    words 2 and 3 (high half)    48 bits   the residual or bonus token, index = where the block stops

Gumbel noise for the `coupled` rule is the only noise keyed by absolute position: see `gumbel.py`.
Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox4x32-10).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .backend import use_triton

MASK32 = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

# The last counter word separates the users of one seed: the verify step's coins, and the keys of the Gumbel hash.
DOMAIN_STEP = 0
DOMAIN_GUMBEL = 1


def philox_reference(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 on Python integers (Salmon et al. 2011, section 3). Words are 32-bit, unsigned."""
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
    shape = (2,) + (1,) * seeds.dim()
    multipliers = torch.tensor(MULTIPLIERS, dtype=torch.int64, device=seeds.device).view(shape)
    weyl = torch.tensor(WEYL, dtype=torch.int64, device=seeds.device).view(shape)
    for _ in range(ROUNDS):
        product = (even * multipliers).flip(0)  # wraps modulo 2**64, which keeps all 64 bits
        even = ((product >> 32) & MASK32) ^ odd ^ keys
        odd = product & MASK32
        keys = (keys + weyl) & MASK32
    return even[0], odd[0], even[1], odd[1]


def unit_interval(high: torch.Tensor, low16: torch.Tensor | None = None) -> torch.Tensor:
    """A 32-bit word, and optionally 16 more bits, as float64 in [0, 1): exact, so 1.0 never occurs."""
    if low16 is None:
        return high.to(torch.float64) * 2.0**-32
    return (high * 65536 + low16).to(torch.float64) * 2.0**-48


@dataclass(frozen=True)
class Coins:
    """The uniforms of one verify step, all float64 in [0, 1).

    Fields:
        draft:  [R, n] for the draft's token at each index (spent before verification).
        accept: [R, n] acceptance coins, one per index.
        final:  [R, n] for the residual or bonus draw at the index where the block stops; one per request is spent.
                n is one more than the block size, since a block may stop after its last token.
    """

    draft: torch.Tensor
    accept: torch.Tensor
    final: torch.Tensor

    def __post_init__(self):
        if not self.draft.shape == self.accept.shape == self.final.shape or self.draft.dim() != 2:
            raise ValueError("Coins hold three [R, n] tensors of one shape")


def draw_coins(seeds: torch.Tensor, steps: torch.Tensor, block_size: int) -> Coins:
    """All coins of one verify step of a block of `block_size` drafts.

    Args:
        seeds: int64 [R] request seeds.
        steps: int64 [R] each request's own count of verify steps; must never repeat for one request.
        block_size: γ.
    Source: docs/design.md section 3 (random numbers); the cipher is Philox4x32-10.
    """
    if use_triton(seeds):
        from .gumbel_triton import coins_triton

        return Coins(*coins_triton(seeds, steps, block_size + 1))
    return draw_coins_torch(seeds, steps, block_size)


def draw_coins_ahead(seeds: torch.Tensor, steps: torch.Tensor, block_size: int, count: int) -> list[Coins]:
    """The coins of the next `count` steps, the first of which is `steps`: as `draw_coins` gives them one by one.

    A step's coins are a few numbers made by some hundred small operations; eight steps' take hardly longer.
    """
    following = steps + torch.arange(count, device=steps.device)[:, None]
    coins = draw_coins(seeds.repeat(count), following.flatten(), block_size)
    return [
        Coins(*columns) for columns in zip(*(x.split(len(seeds)) for x in (coins.draft, coins.accept, coins.final)))
    ]


def draw_coins_torch(seeds: torch.Tensor, steps: torch.Tensor, block_size: int) -> Coins:
    """The torch path of `draw_coins`."""
    index = torch.arange(block_size + 1, dtype=torch.int64, device=seeds.device)
    word0, word1, word2, word3 = philox(seeds[:, None], steps[:, None], index[None, :])
    return Coins(
        draft=unit_interval(word0, word3 & 0xFFFF),
        accept=unit_interval(word1),
        final=unit_interval(word2, word3 >> 16),
    )
