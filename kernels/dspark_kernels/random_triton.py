"""Triton kernels of `random.py`: the coins of a step, and the words and the mixer that seeded noise is made of."""

from __future__ import annotations

import torch

from .backend import jit, tl


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
    """Bits 0 to 31 of a 64-bit integer (uint32)."""
    return (x & 0xFFFFFFFF).to(tl.uint32)


@jit
def high_word(x):
    """Bits 32 to 63 of a 64-bit integer (uint32)."""
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


def coins_triton(seeds: torch.Tensor, steps: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """(draft, accept, final) uniforms, float64 [R, count] each."""
    draft, accept, final = torch.empty(3, len(seeds), count, dtype=torch.float64, device=seeds.device)
    coins_kernel[(len(seeds),)](
        seeds.contiguous(), steps.contiguous(), draft, accept, final, count, BLOCK=1 << max(0, count - 1).bit_length()
    )
    return draft, accept, final
