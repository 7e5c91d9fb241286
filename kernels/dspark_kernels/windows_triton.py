"""Triton kernel of `windows.py`: the K-th largest survival by bisecting its bit pattern, in one program."""

from __future__ import annotations

import torch

from .backend import jit, tl

MAX_ENTRIES = 16384  # of the padded tile held by one program; larger batches take the sort


@jit
def minimum(a, b):
    return tl.minimum(a, b)


@jit
def windows_kernel(
    survival_ptr, budget_ptr, low_ptr, high_ptr, out_ptr, R, G, stride_r, stride_g,
    R2: tl.constexpr, G2: tl.constexpr,
):  # fmt: skip
    """Position-major tile [G2, R2]: its flat order is the order of ties, position first, then request."""
    request = tl.arange(0, R2)
    position = tl.arange(0, G2)
    inside = (position[:, None] < G) & (request[None, :] < R)
    at = request[None, :].to(tl.int64) * stride_r + position[:, None] * stride_g
    key = tl.load(survival_ptr + at, mask=inside, other=0.0).to(tl.float32)
    key = tl.where(key == key, key, 0.0)  # noqa: PLR0124 - false of a NaN alone
    key = tl.associative_scan(key, 0, minimum)
    low = tl.load(low_ptr + request, mask=request < R, other=0).to(tl.int32)
    high = tl.load(high_ptr + request, mask=request < R, other=0).to(tl.int32)
    candidate = inside & (position[:, None] >= low[None, :]) & (position[:, None] < high[None, :])
    key = tl.where(candidate, key, -1.0)
    left = tl.load(budget_ptr).to(tl.int32) - tl.sum(low, axis=0)
    first = 0
    last = 0x7F7FFFFF
    for _ in range(31):
        middle = first + (last - first) // 2
        fewer = tl.sum(tl.sum((key > middle.to(tl.float32, bitcast=True)).to(tl.int32), axis=1), axis=0) < left
        last = tl.where(fewer, middle, last)
        first = tl.where(fewer, first, tl.minimum(middle + 1, last))
    threshold = last.to(tl.float32, bitcast=True)
    over = key > threshold
    ties_left = left - tl.sum(tl.sum(over.to(tl.int32), axis=1), axis=0)
    tied = tl.reshape((candidate & (key == threshold)).to(tl.int32), [G2 * R2])
    rank = tl.reshape(tl.cumsum(tied, axis=0), [G2, R2])
    admitted = over | (candidate & (key == threshold) & (rank <= ties_left))
    window = low + tl.where(left > 0, tl.sum(admitted.to(tl.int32), axis=0), 0)
    tl.store(out_ptr + request, window, mask=request < R)


def _padded(requests: int, gamma: int) -> tuple[int, int]:
    return 1 << max(0, requests - 1).bit_length(), 1 << max(0, gamma - 1).bit_length()


def fits(survival: torch.Tensor) -> bool:
    """True if one program holds the batch; larger ones, and empty ones, take the torch path."""
    requests, gamma = survival.shape
    padded = _padded(requests, gamma)
    return requests > 0 and gamma > 0 and padded[0] * padded[1] <= MAX_ENTRIES


def allocate_windows_triton(
    survival: torch.Tensor, budget: int | torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> torch.Tensor:
    """As `allocate_windows_torch`: int32 [R], one launch, no synchronisation. The batch must fit (`fits`)."""
    requests, gamma = survival.shape
    padded = _padded(requests, gamma)
    if not isinstance(budget, torch.Tensor):
        budget = torch.full((1,), budget, dtype=torch.int64, device=survival.device)
    out = torch.empty(requests, dtype=torch.int32, device=survival.device)
    windows_kernel[(1,)](
        survival, budget, low.contiguous(), high.contiguous(), out, requests, gamma, *survival.stride(),
        R2=padded[0], G2=padded[1], num_warps=8,
    )  # fmt: skip
    return out
