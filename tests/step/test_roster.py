"""The requests of a step: their noise is spent once, however the batch changes around them."""

from __future__ import annotations

import numpy as np
import torch

from dspark_kernels.random import draw_coins
from dspark_kernels.sampling import SamplingRows
from dspark_kernels.types import AcceptRule, RequestRules
from sglang_dspark.step.types import STEPS_AHEAD, RequestState, Roster

GAMMA = 3


def roster(*states: RequestState) -> Roster:
    rules = RequestRules.of([AcceptRule.BLOCK] * len(states))
    seeds = torch.tensor([state.seed for state in states])
    return Roster((), list(states), np.zeros(len(states), bool), SamplingRows.of([1.0] * len(states)), rules, seeds)


def test_every_step_spends_the_coins_of_its_own_count_also_after_the_batch_has_changed():
    """Catches coins drawn ahead for a batch and kept, or dropped and drawn again, when a request joins or leaves."""
    a, b = RequestState("a", 11, False), RequestState("b", 12, False)
    spent = []
    for batch, steps in ((roster(a), STEPS_AHEAD + 3), (roster(a, b), 2), (roster(b), 1), (roster(a), STEPS_AHEAD)):
        for _ in range(steps):
            counts = [state.steps for state in batch.states]
            coins = batch.noise(torch.zeros(len(counts), dtype=torch.int64), GAMMA).coins
            assert torch.equal(coins.accept, draw_coins(batch.seeds, torch.tensor(counts), GAMMA).accept)
            spent += [tuple(row.tolist()) for row in coins.accept]
    assert len(set(spent)) == len(spent) == STEPS_AHEAD * 2 + 3 + 4 + 1
    assert (a.steps, b.steps) == (2 * STEPS_AHEAD + 5, 3)
