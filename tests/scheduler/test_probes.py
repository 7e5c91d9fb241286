"""Probes: what is never tried is never corrected, and trying has a price that is kept.

Bug classes: a planner that never drafts again after it stopped, one that never decodes plainly, probes that cost more
than they may or ignore bounds and ceilings, an interval that does not follow what changes. Strength: scripted loads with
counted probes; what they are worth under false beliefs stands in test_simulation.
"""

from __future__ import annotations

import numpy as np
import pytest

from dspark_scheduler import (
    POLICIES,
    AdditiveCostModel,
    ContextSurvival,
    OnlineCostModel,
    Plan,
    Planner,
    ProbeRule,
    survival,
)

GAMMA = 4


def cost(draft: float = 0.1) -> AdditiveCostModel:
    return AdditiveCostModel(1.0, ([1], [0.0]), ([1, 8, 80], [0.0, 0.3, 7.5]), head=([1, 64], [draft, 4 * draft]))


class Deaf(OnlineCostModel):
    """Is told what steps take and believes none of it, so that probes alone decide what is tried."""

    def observe(self, *arguments, **named) -> None:
        """Learns nothing."""


def run(planner: Planner, steps: range, requests: int, confidence: float, **bounds) -> list[Plan]:
    """Steps of a server whose confidence is the same everywhere; the plans."""
    plans = []
    for step in steps:
        ids = list(range(requests))
        plans.append(planner.plan(step, ids, 0, **bounds))
        if not plans[-1].skip_draft:
            planner.publish(step, ids, survival(np.full((requests, GAMMA), confidence)))
    return plans


def probes(plans: list[Plan]) -> dict[int, int]:
    """The window of every probe by its step."""
    return {step: int(plan.high.max()) for step, plan in enumerate(plans) if plan.probe}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_probe_is_one_window_for_all_within_their_bounds(policy):
    """Everything that a probe decides stands in the plan: K, low and high, so that a device needs no second case."""
    planner = Planner(GAMMA, Deaf(cost(0.0)), POLICIES[policy], probes=ProbeRule(first=2, longest=2, loss=1.0))
    high, met = np.array([4, 0, 2]), set()
    for step in range(40):
        plan = planner.plan(step, "abc", 0, 0, high)
        now = survival(np.full((3, GAMMA), 0.8))
        if not plan.skip_draft:
            planner.publish(step, "abc", now)
        if plan.probe:
            window = int(plan.high.max())
            assert plan.low.tolist() == plan.high.tolist() == np.minimum(window, high).tolist()
            assert plan.tokens == plan.low.sum() and plan.draft_length == window
            if window:
                reads = {"tokens": now, "context": ContextSurvival(now, False), "nothing": None}
                assert planner.policy.windows(plan, reads[planner.policy.reads]).tolist() == plan.low.tolist()
            met.add(window)
    assert met == {0, 1, 2, 3, 4}


def test_with_a_fixed_cost_only_a_rest_is_probed_and_by_drafts():
    """A cost that does not learn is not asked again; confidence that nobody sees must be."""
    drafting = Planner(GAMMA, cost(0.0), POLICIES["causal"])
    assert not probes(run(drafting, range(500), 2, 0.9))
    resting = Planner(GAMMA, cost(0.4), POLICIES["causal"])
    plans = run(resting, range(3000), 16, 0.05)
    assert all(plan.skip_draft for plan in plans[4:] if not plan.probe)
    assert {window for step, window in probes(plans).items() if step > 2} == {1, 2, 3, 4}


def test_plain_decoding_is_left_at_once_when_a_probe_shows_that_drafting_pays():
    planner = Planner(GAMMA, cost(0.4), POLICIES["causal"])
    run(planner, range(600), 16, 0.05)
    back = run(planner, range(600, 1200), 2, 0.95)
    first = next(step for step, plan in enumerate(back) if not plan.skip_draft)
    assert first <= 128 and sum(plan.skip_draft for plan in back[first:]) <= 2


STEP = AdditiveCostModel(1.0, ([1], [0.0]), ([8, 9, 40], [0.0, 3.0, 3.1]))  # 8 requests had better rest


@pytest.mark.parametrize(
    ("requests", "confidence", "model"),
    [(1, 0.8, cost()), (8, 0.7, cost()), (64, 0.3, cost()), (8, 0.5, STEP)],
    ids=["one", "some", "resting", "all dear"],
)
def test_probes_are_predicted_to_lose_less_than_their_share(requests, confidence, model):
    """Averaged over time, the first round included: what a probe takes less what it brings, in steps of the plan."""
    planner = Planner(GAMMA, Deaf(model), POLICIES["causal"])
    plans = run(planner, range(6000), requests, confidence)
    chosen = next(plan for plan in reversed(plans) if not plan.probe)
    lost = [
        plan.step_seconds / chosen.step_seconds - plan.expected_tokens / chosen.expected_tokens
        for plan in plans[100:]
        if plan.probe
    ]
    assert len(lost) > 5 and set(probes(plans).values()) >= {1, 2, 3, 4}
    assert sum(lost) <= 0.003 * len(plans) + planner._prober.rule.credit
    steps = {window: [s for s, w in probes(plans).items() if w == window] for window in set(probes(plans).values())}
    dear = max(steps, key=lambda w: abs(w - chosen.draft_length))
    near = min((w for w in steps if w != dear), key=lambda w: abs(w - chosen.draft_length))
    assert len(steps[dear]) <= len(steps[near]) + 1, steps


def test_the_interval_doubles_while_nothing_changes_and_starts_over_when_the_choice_does():
    planner = Planner(GAMMA, Deaf(cost(0.0)), POLICIES["causal"], probes=ProbeRule(first=8, longest=32, loss=1.0))
    gaps = np.diff(list(probes(run(planner, range(800), 2, 0.8))))
    assert gaps[:4].tolist() == [9] * 4 and set(gaps[-8:]) == {33} and sorted(set(gaps)) == [9, 17, 33]
    after = np.diff(list(probes(run(planner, range(800, 1000), 2, 0.2))))
    assert 9 in after[:3]


def test_the_interval_starts_over_when_the_cost_of_a_probe_turns_out_another():
    model = Deaf(cost(0.0))
    planner = Planner(GAMMA, model, POLICIES["causal"], probes=ProbeRule(first=8, longest=32, loss=1.0))
    run(planner, range(800), 2, 0.8)
    model.model = AdditiveCostModel(1.3, ([1], [0.0]), model.model.theta)  # dearer by as much for every choice
    assert 9 in np.diff(list(probes(run(planner, range(800, 900), 2, 0.8))))[:3]


def test_probes_keep_to_minima_and_to_the_ceiling():
    model = Deaf(cost(0.0))
    planner = Planner(GAMMA, model, POLICIES["causal"], probes=ProbeRule(first=2, longest=2, loss=1.0))
    assert min(probes(run(planner, range(60), 2, 0.8, low=2)).values()) == 2
    planner.max_step_seconds = float(model.step_seconds(2, 7))  # two drafts per request fit, three do not
    assert set(probes(run(planner, range(60, 120), 2, 0.8)).values()) == {0, 1, 2}


def test_nonsense_is_refused():
    for wrong in ({"first": 9, "longest": 8}, {"first": 0}, {"loss": 0.0}):
        with pytest.raises(ValueError, match="need 1 <= first"):
            ProbeRule(**wrong)
