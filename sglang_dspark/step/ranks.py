"""Tensor-parallel ranks in step: what a step decides is decided by the first rank and told to the others.

Floats may differ between ranks in the last bit; a budget, window, token or length that followed such a difference would
give the ranks batches of different shapes and hang their next collective.
"""

from __future__ import annotations

import json

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

    def goes_on(self, wish: bool) -> bool:
        """Whether the first rank wishes to go on: a loop whose body holds collectives must end on all ranks at once, and
        clocks differ."""
        return bool(self.numbers(np.array([wish]))[0])

    def json(self, value: dict) -> dict:
        """The first rank's value (JSON types): what was read from a file that another node may not have."""
        if self.alone:
            return value
        text = json.dumps(value).encode()
        size = int(self.numbers(np.array([len(text)]))[0])
        data = np.frombuffer(text, np.uint8) if len(text) == size else np.zeros(size, np.uint8)
        return json.loads(self.numbers(data).astype(np.uint8).tobytes())

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """The first rank's tensor (on the device, same shape and dtype on all ranks), in place."""
        return values if self.alone else self.group.broadcast(values.contiguous(), src=0)
