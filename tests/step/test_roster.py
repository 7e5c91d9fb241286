"""The requests of a step: their noise is spent once, however the batch changes around them."""

from __future__ import annotations

import numpy as np
import torch

from dspark_kernels.random import draw_coins
from dspark_kernels.types import AcceptRule, RequestRules, SamplingRows
from sglang_dspark.step.types import RequestState, Roster

GAMMA, MANY = 3, 8


def roster(*states: RequestState) -> Roster:
    rules = RequestRules.of([AcceptRule.BLOCK] * len(states))
    seeds = torch.tensor([state.seed for state in states])
    rows, ends = SamplingRows.of([1.0] * len(states)), torch.full_like(seeds, 99)
    steps = torch.tensor([state.steps for state in states])
    return Roster((), list(states), np.zeros(len(states), bool), rows, rules, seeds, ends, steps)


def test_every_step_spends_the_coins_of_its_own_count_also_after_the_batch_has_changed():
    """Catches a count on the device that is not the request's own after another joined or left: coins spent twice."""
    a, b = RequestState("a", 11, False), RequestState("b", 12, False)
    spent = []
    for states, steps in (((a,), MANY + 3), ((a, b), 2), ((b,), 1), ((a,), MANY)):
        batch = roster(*states)
        for _ in range(steps):
            counts = [state.steps for state in batch.states]
            coins = batch.noise(torch.zeros(len(counts), dtype=torch.int64), GAMMA).coins
            assert torch.equal(coins.accept, draw_coins(batch.seeds, torch.tensor(counts), GAMMA).accept)
            spent += [tuple(row.tolist()) for row in coins.accept]
    assert len(set(spent)) == len(spent) == MANY * 2 + 3 + 4 + 1
    assert (a.steps, b.steps) == (2 * MANY + 5, 3)
