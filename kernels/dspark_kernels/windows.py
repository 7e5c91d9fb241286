"""Windows on the device: the K drafts with the highest survival, contiguous per request.

The same allocation as `dspark_scheduler.allocate_windows` (numpy): top K, ties by (position, request), so that a
host plan and a device plan agree and no later draft of a request can displace an earlier one.
Source: DSpark, section 5.2 (budgeted top-K); the tie rule is that of docs/design.md (policies).
"""

from __future__ import annotations

import torch

from .backend import use_triton


def allocate_windows(
    survival: torch.Tensor,
    budget: int | torch.Tensor,
    min_window: int | torch.Tensor = 0,
    max_window: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """Admit the `budget` most likely drafts of the batch.

    Args:
        survival: float [R, γ], non-increasing along a row. Nothing can be raised on a device, so a NaN counts as 0 and
            a rising value as the one before it: windows stay contiguous whatever comes in.
        budget: drafts admitted in all, minimum windows included (host int, or int tensor of one element).
        min_window, max_window: bounds, one for all or int [R]; None is γ; where they clash the maximum holds.
    Returns:
        int32 [R] windows, 0 <= w <= γ.
    """
    if survival.dim() != 2:
        raise ValueError(f"survival must be [requests, block size], got {tuple(survival.shape)}")
    low, high = window_bounds(survival, min_window, max_window)
    if use_triton(survival):
        from .windows_triton import allocate_windows_triton, fits

        if fits(survival):
            return allocate_windows_triton(survival, budget, low, high)
    return allocate_windows_torch(survival, budget, low, high)


def window_bounds(
    survival: torch.Tensor, min_window: int | torch.Tensor, max_window: int | torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds as two int64 [R] tensors with 0 <= low <= high <= γ. Nothing is copied to a device: a host number fills."""
    requests, gamma = survival.shape

    def spread(bound: int | torch.Tensor) -> torch.Tensor:
        if isinstance(bound, torch.Tensor):
            return bound.to(torch.int64).expand(requests)
        return torch.full((requests,), bound, dtype=torch.int64, device=survival.device)

    high = spread(gamma if max_window is None else max_window).clamp(0, gamma)
    return torch.minimum(spread(min_window).clamp(min=0), high), high


def allocate_windows_torch(
    survival: torch.Tensor, budget: int | torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> torch.Tensor:
    """The torch path: one stable sort, O(Rγ log Rγ), no synchronisation. low, high: as `window_bounds` gives them."""
    requests, gamma = survival.shape
    ranked = torch.nan_to_num(survival.float(), nan=0.0).cummin(dim=1).values
    position = torch.arange(gamma, device=survival.device)
    candidate = (position >= low[:, None]) & (position < high[:, None])
    # Position-major order and a stable sort are the tie rule; what is not a candidate goes last.
    keys = torch.where(candidate, ranked, -1.0).t().reshape(-1)
    order = torch.sort(keys, descending=True, stable=True).indices
    if isinstance(budget, torch.Tensor):
        budget = budget.reshape(())
    left = budget - low.sum()
    admitted = (torch.arange(order.numel(), device=survival.device) < left) & (keys[order] >= 0)
    counts = torch.zeros(max(requests, 1), dtype=torch.int64, device=survival.device)
    counts.scatter_add_(0, order % max(requests, 1), admitted.to(torch.int64))
    return (low + counts[:requests]).to(torch.int32)
