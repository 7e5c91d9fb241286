"""A GPU's half of a whole step equals the CPU's half: SGLang's graph runner, token tiers, padding, Triton attention.

Bug class: everything that only a GPU's half does. Rows padded to a tier that reach a live slot, windows that the graph
does not hear of, a static buffer that a step does not fill, a host length that overlap does not keep: each changes tokens,
lengths, windows or KV here. The graphs are recorded launches (`graphs`), so a replay sees static buffers alone.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.accelerator import steps
from tests.accelerator.steps import Asked, Case

GREEDY, SAMPLED, SEEDED = Asked(), Asked(1.0, tokens=9), Asked(1.0, seed=7, tokens=3)
FILTERED = Asked(1.3, top_k=40, top_p=0.9, min_p=0.02, tokens=12)
PENALISED = Asked(0.8, penalty=0.7, tokens=6)
THREE, TWICE = (0, 1, 2), ((0, 1, 2),) * 2


def ragged(*asked: Asked, bounds=(0, None, 2, 1, 3, None)) -> tuple[Asked, ...]:
    return tuple(replace(one, most=most) for one, most in zip(asked, bounds))


CAUSAL = (("verify_mode", "compact"), ("window_policy", "causal"))
LAGGED = (("verify_mode", "compact"), ("window_policy", "lagged"))
CAP = (("verify_mode", "cap-accept"), ("window_policy", "causal"))
QUICK = {
    "greedy, ragged": Case(ragged(GREEDY, SAMPLED, GREEDY), TWICE),
    "whole blocks": Case((GREEDY, SAMPLED, SEEDED), TWICE),
    "seeded, filtered and sampled, ragged": Case(ragged(SEEDED, FILTERED, SAMPLED), TWICE),
    "penalised": Case(ragged(PENALISED, GREEDY, SAMPLED, bounds=(None, 2, 3)), TWICE),
    "plain": Case(ragged(GREEDY, SAMPLED, SEEDED, bounds=(0, 0, 0)), TWICE),
    "one request, then others, then fewer": Case(
        ragged(GREEDY, SAMPLED, FILTERED, SEEDED), ((1,), (0, 1, 3), (3, 2), (2,))
    ),
    "more requests than the largest graph holds": Case(
        ragged(GREEDY, SAMPLED, FILTERED, SEEDED, GREEDY, SAMPLED), ((0, 1, 2, 3, 4, 5), (0, 1, 2, 5))
    ),
    "causal": Case((GREEDY, SAMPLED, SEEDED), (THREE,) * 4, CAUSAL),
    "lagged": Case((GREEDY, SAMPLED, FILTERED), (THREE,) * 4, LAGGED),
    "cap-accept": Case((GREEDY, SAMPLED, SEEDED), (THREE,) * 3, CAP),
    "our kernels": Case(ragged(GREEDY, SAMPLED, SEEDED), TWICE, kernels=True),
}


def hold(child, case: Case):
    gpu, cpu, apart = child(steps.both, case)
    assert gpu.lengths == cpu.lengths and gpu.tokens == cpu.tokens and gpu.windows == cpu.windows
    assert max(apart) < 1e-4
    return gpu


def random_case(number: int) -> Case:
    """Requests of all kinds that come, go and return; every policy; our kernels in every other one."""
    chance = random.Random(number)
    kinds = (GREEDY, SAMPLED, SEEDED, FILTERED, PENALISED)
    asked = [replace(chance.choice(kinds), most=chance.choice((None, None, 0, 1, 3))) for _ in range(6)]
    asked = [replace(one, tokens=chance.randint(1, 14)) for one in asked]
    batches = tuple(tuple(sorted(chance.sample(range(6), chance.randint(1, 6)))) for _ in range(5))
    settings = chance.choice((CAUSAL, LAGGED, CAP, (("verify_mode", "static"),)))
    rule = ("accept_rule", chance.choice(("token", "block")))
    return Case(tuple(asked), batches, (*settings, rule), kernels=number % 2 == 0)


@pytest.mark.long
@pytest.mark.parametrize("number", range(24))
def test_random_batches_hold_as_well(child, number):
    hold(child, random_case(number))


@pytest.mark.parametrize("name", QUICK)
def test_a_gpus_step_commits_what_the_cpus_step_commits(child, name):
    gpu = hold(child, QUICK[name])
    fits = [len(members) <= 4 for members in QUICK[name].batches]
    assert gpu.in_graph == fits, "a batch that a graph holds ran without one"


def test_the_cases_are_not_all_alike(child):
    """Windows differ within a batch, drafts are accepted and refused, and policies choose other windows than static."""
    names = ("greedy, ragged", "causal", "lagged")
    bounded, causal, lagged = (child(steps.run, QUICK[name], False) for name in names)
    assert len({w for step in bounded.windows for w in step}) >= 3
    for policy in (causal, lagged):
        assert any(0 < sum(step) and len(set(step)) > 1 for step in policy.windows)
    assert causal.windows != lagged.windows
    accepted = [n - 1 for step in bounded.lengths for n in step]
    assert any(accepted) and not all(accepted)
