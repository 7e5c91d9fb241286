"""Tensor-parallel ranks in step: what a step decides is decided by the first rank and told to the others.

Floats may differ between ranks in the last bit; a budget, window, token or length that followed such a difference would
give the ranks batches of different shapes and hang their next collective.
"""

from __future__ import annotations

import numpy as np
import torch
from sglang.srt.runtime_context import get_parallel


class Ranks:
    """The tensor-parallel group of this process. With one rank nothing is sent."""

    def __init__(self) -> None:
        self.group = get_parallel().tp_group
        self.alone = self.group.world_size == 1

    def numbers(self, values: np.ndarray) -> np.ndarray:
        """The first rank's integers (host array, same shape on all ranks)."""
        if self.alone:
            return values
        shared = torch.from_numpy(np.ascontiguousarray(values, np.int64))
        torch.distributed.broadcast(shared, src=self.group.ranks[0], group=self.group.cpu_group)
        return shared.numpy()

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """The first rank's tensor (on the device, same shape and dtype on all ranks), in place."""
        return values if self.alone else self.group.broadcast(values.contiguous(), src=0)
