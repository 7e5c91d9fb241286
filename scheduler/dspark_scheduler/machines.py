"""Two machines for the simulator: the staircase of a GPU, and the CPU this project was measured on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .cost import AdditiveCostModel
from .plan import DraftShape


@dataclass(frozen=True)
class Machine:
    """A cost model, and how far a draft can be shortened on it.

    Attributes:
        name: "gpu" or "cpu".
        cost: the true cost of a step.
        drafting: what the draft computes under policy `causal` and for fixed lengths (see `DraftShape`).
        drafting_known: the same where windows are known before drafting (`lagged`, `ahead`).
    """

    name: str
    cost: AdditiveCostModel
    drafting: str
    drafting_known: str

    def shape(self, gamma: int) -> DraftShape:
        """What it drafts under policy `causal` and for fixed lengths."""
        return DraftShape(self.drafting, gamma)


def gpu() -> Machine:
    """An 8B model on one large GPU, assumed in the shape of public figures (147 tokens/s at 1 request, 2 995 at 32).

    Weights take 6.4 ms to read, so rows are nearly free up to about 100; then they cost 25 µs each. Steps are padded to
    captured tiers. The draft always computes its whole block, in a graph of its own.
    """
    tiers = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
    theta = ([1, 32, 64, 128, 256, 2048], np.array([0.0, 0.1, 0.4, 1.7, 4.7, 49.5]) / 1000)
    block = ([7, 224, 1792], np.array([0.9, 1.2, 6.0]) / 1000)
    cost = AdditiveCostModel(6.4e-3, ([1, 256], [0.0, 12e-3]), theta, tiers, 1e-8, block=block)
    return Machine("gpu", cost, "block", "block")


def cpu() -> Machine:
    """SmolLM2-135M in bf16 on two EPYC cores with a draft of one layer and 8k words, as measured on 2026-11-29.

    No padding: the cost follows the rows. The draft computes no more slots than it is asked for.
    """
    rows = [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192]
    seconds = np.maximum.accumulate([35, 34, 38, 40, 41, 47, 49, 57, 63, 81, 95, 122, 147, 203]) / 1000
    head = ([1, 5, 20, 40, 80], np.array([1.8, 2.1, 3.2, 4.8, 7.5]) / 1000)
    return Machine("cpu", AdditiveCostModel(0.0, ([1], [0.0]), (rows, seconds), (), 0.0, head), "depth", "windows")


MACHINES = {"gpu": gpu, "cpu": cpu}
