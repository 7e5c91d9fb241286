"""What the device knows of each running request, as tensors alone: the static inputs of a captured draft."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from .types import AcceptRule, RequestRules, SamplingRows


@dataclass(frozen=True)
class RequestTensors:
    """Sampling parameters, rule and noise counters of R requests.

    Fields:
        temperature, top_p, min_p: float32 [R]; top_k: int64 [R]; greedy: bool [R]: as in `SamplingRows`.
        rule: int32 [R], an `AcceptRule` each. seeds, steps: int64 [R], the keys of the step's coins.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    greedy: torch.Tensor
    rule: torch.Tensor
    seeds: torch.Tensor
    steps: torch.Tensor

    def __len__(self) -> int:
        return self.rule.shape[0]

    @classmethod
    def of(cls, rows: SamplingRows, rules: RequestRules, seeds: torch.Tensor, steps: torch.Tensor) -> RequestTensors:
        """From what a batch knows of its requests; nothing is copied."""
        return cls(rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.greedy, rules.rule, seeds, steps)

    @classmethod
    def buffers(cls, most: int, device: torch.device | str) -> RequestTensors:
        """Static memory of `most` greedy requests, to be filled by `copy_`."""

        def full(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((most,), value, dtype=dtype, device=device)

        one, zero = full(1.0, torch.float32), full(0, torch.int64)
        return cls(
            one, full(1, torch.int64), one.clone(), full(0.0, torch.float32), full(True, torch.bool),
            full(AcceptRule.GREEDY, torch.int32), zero, zero.clone(),
        )  # fmt: skip

    def first(self, count: int) -> RequestTensors:
        """Views of the first `count` requests."""
        return RequestTensors(*(getattr(self, field.name)[:count] for field in fields(self)))

    def copy_(self, other: RequestTensors) -> None:
        """Take over R requests at the front; whoever is behind them becomes a greedy request, which draws no number."""
        count = len(other)
        for field in fields(self):
            getattr(self, field.name)[:count].copy_(getattr(other, field.name), non_blocking=True)
        self.greedy[count:].fill_(True)
        self.rule[count:].fill_(int(AcceptRule.GREEDY))
