"""Survival, and the budget it pays for, where the confidence is: on the device, without reading a number back.

The same rules as `dspark_scheduler` (numpy, on the host), whose calibration and cost these take as a few numbers.
"""

from __future__ import annotations

import torch


def calibrated_survival(
    logits: torch.Tensor, slope: torch.Tensor, shift: torch.Tensor, greedy: torch.Tensor
) -> torch.Tensor:
    """The probability that a draft and all before it are accepted: cumprod of σ(slope · logit + shift).

    Args:
        logits: float [R, k], raw confidence, k <= γ. slope, shift: float32 [2, γ], of sampled (row 0) and greedy
            requests (row 1). greedy: bool [R].
    Returns:
        float32 [R, k], never rising along a row.
    Source: DSpark (sequential temperature scaling), with the shift of `OnlineCalibrator`. The slope is
        1 / (T of the draft's own scaling · T online).
    """
    k = logits.shape[1]
    a, b = (torch.where(greedy[:, None], x[1, :k], x[0, :k]) for x in (slope, shift))
    return torch.sigmoid(logits.float() * a + b).cumprod(dim=1)


def best_tokens(
    survival: torch.Tensor,
    seconds: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    most: int | None = None,
) -> torch.Tensor:
    """The K that commits most tokens per second: argmax of (R + Σ of the K best survivals) / seconds[K].

    The minimum windows are verified whatever their survival, so K runs from Σ low to Σ high; the first of equals wins.

    Args:
        survival: float [R, γ], non-increasing along a row, in [0, 1].
        seconds: float [> R·γ], what a step that verifies K drafts takes; inf forbids a K.
        low, high: int64 [R], 0 <= low <= high <= γ. most: K is at most this host number (what the graph's rows allow).
    Returns:
        int64 [1], as `allocate_windows` takes it.
    Source: DSpark, Algorithm 1 without its early stop; host twin: `dspark_scheduler.best_budget`.
    """
    requests, gamma = survival.shape
    position = torch.arange(gamma, device=survival.device)
    values = survival.to(torch.float64)
    forced = position < low[:, None]
    base = requests + torch.where(forced, values, 0.0).sum()
    open_ = ~forced & (position < high[:, None])
    ladder = torch.where(open_, values, -1.0).flatten().sort(descending=True).values
    gain = torch.nn.functional.pad(ladder.clamp(min=0.0).cumsum(0), (1, 0))
    floor, ceiling = low.sum(), high.sum()
    if most is not None:
        ceiling = torch.maximum(ceiling.clamp(max=most), floor)
    count = torch.arange(requests * gamma + 1, device=survival.device)
    tokens = floor + count
    price = seconds.to(torch.float64)[tokens.clamp(max=requests * gamma)]
    rate = torch.where(tokens <= ceiling, (base + gain) / price, -1.0)
    return (floor + rate.argmax()).reshape(1)
