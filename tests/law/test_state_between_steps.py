"""The whole planner over several steps: relay, running mean, online calibration, online cost, skipping and probing.

Bug class: state that carries what a token was into a decision about a token not yet drawn, for example a calibrator or
a running mean that is fed this step's outcomes before this step's windows are decided. Strength: exact law of four
tokens of one request, with every path replayed through the real `Planner`; the planted planner reads its running mean
from this step and is seen.
"""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from functools import partial

import numpy as np
import pytest

from dspark_kernels.reference import emit
from dspark_scheduler import (
    POLICIES,
    AdditiveCostModel,
    ContextSurvival,
    CostLearning,
    OnlineCalibrator,
    OnlineCostModel,
    Planner,
    ProbeRule,
    survival,
)

from .chance import outcomes
from .decoder import World, target_law, total_variation

GAMMA = 2
# Drafting pays if both drafts are likely: the choice is 0 or 2, and turns on what the second confidence reads.
COST = AdditiveCostModel(0.0, ([1], [0.0]), ([1, 2, 3], [1.0, 1.85, 1.95]), head=([2], [0.05]))


class Learner(Planner):
    """A planner with the calibrator that a worker keeps beside it."""

    def __init__(self, policy: str) -> None:
        cost = OnlineCostModel(COST, CostLearning(refit_every=1, memory=2))
        super().__init__(GAMMA, cost, POLICIES[policy], probes=ProbeRule(first=1, longest=2, loss=0.5))
        self.calibrator = OnlineCalibrator(GAMMA, memory=2, refit_every=1, prior=1)


def logits_of(world: World, text: tuple, drafts: tuple) -> np.ndarray:
    """Raw confidence logits [1, γ] of a block, from the world's survival."""
    s = world.survival(0, text, drafts)
    c = np.clip(s / np.concatenate([[1.0], s[:-1]]), 0.05, 0.95)
    return np.log(c / (1 - c))[None]


def plan(planner: Learner, step: int, world: World, text: tuple, drafts: tuple) -> tuple[int, bool]:
    """The window of this step and whether drafting was skipped; publishes as the worker does."""
    now, policy = survival(planner.calibrator.apply(logits_of(world, text, drafts))), planner.policy
    chosen = planner.plan(step, [0], len(text))
    if chosen.skip_draft:
        return 0, True
    planner.publish(step, [0], now)
    reads = {"tokens": now, "context": ContextSurvival(now, False), "nothing": None}
    return int(policy.windows(chosen, reads[policy.reads])[0]), False


def tell(planner: Learner, world: World, text: tuple, drafts: tuple, window: int, accepted: int, skipped: bool) -> None:
    """What the worker reports after a step; a made-up time that depends on the outcome, which must not matter."""
    if not skipped:
        position = np.arange(GAMMA)
        observed = ((position < window) & (position <= accepted))[None]
        planner.calibrator.observe(logits_of(world, text, drafts), (position < accepted)[None], observed)
        planner.calibrator.end_step()
    length = 0 if skipped else GAMMA
    seconds = float(COST.step_seconds(1, 1 + window)) + COST.draft_seconds(1, length, length)
    planner.cost.observe(1, 1 + window, len(text), seconds * (1 + 0.1 * accepted), slots=length, length=length)


def replay(policy: str, world: World, log: tuple, planner_of) -> tuple[Learner, tuple]:
    planner, text = planner_of(policy), ()
    for step, (drafts, accepted, tokens) in enumerate(log):
        window, skipped = plan(planner, step, world, text, drafts)
        tell(planner, world, text, drafts, window, accepted, skipped)
        text = (*text, *tokens)
    return planner, text


def decode(world: World, policy: str, rule: str, count: int, planner_of=Learner):
    """The exact law of `count` tokens, and the (window, skipped) pairs met on the way."""
    done, states, met = defaultdict(Fraction), {(): Fraction(1)}, set()
    while states:
        following = defaultdict(Fraction)
        for log, chance in states.items():
            _, text = replay(policy, world, log, planner_of)
            for drafts, weight in world.drafts(0, text):
                planner, _ = replay(policy, world, log, planner_of)
                window, skipped = plan(planner, len(log), world, text, drafts)
                met.add((window, skipped))
                block = drafts[:window]  # the row after the window is drawn from the target
                p = [world.target(0, (*text, *block[:i])) for i in range(window + 1)]
                q = [world.draft(0, text, block[:i]) for i in range(window)]
                for (result, _), more in outcomes(partial(emit, "compact", rule, p, q, block, window)).items():
                    after = (*text, *result.tokens)
                    if len(after) >= count:
                        done[(after[:count],)] += chance * weight * more
                    else:
                        following[(*log, (drafts, result.accepted, result.tokens))] += chance * weight * more
        states = following
    return dict(done), met


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_planner_with_all_its_memory_keeps_the_law(policy, rule):
    met = set()
    for seed in range(2):
        world = World(seed, 2, GAMMA, reads_tokens=policy != "ahead")
        law, seen = decode(world, policy, rule, 4)
        assert total_variation(law, target_law(world, 1, 4)) == 0
        met |= seen
    assert len(met) >= 2, met


class Hasty(Learner):
    """The planted fault: plans on this step's survival as if it were its running mean."""

    now = None

    def __init__(self, policy: str) -> None:
        super().__init__(policy)
        apply = self.calibrator.apply

        def remember(logits):
            self.now = survival(apply(logits))
            return apply(logits)

        self.calibrator.apply = remember

    def plan(self, *arguments):
        if self.now is not None:
            self.running_mean = self.now[0]
        return super().plan(*arguments)


def test_a_running_mean_that_reads_this_step_is_seen():
    found = max(
        total_variation(decode(world, "lagged", "token", 1, Hasty)[0], target_law(world, 1, 1))
        for world in (World(seed, 2, GAMMA) for seed in range(40))
    )
    assert found > Fraction(1, 100), float(found)
