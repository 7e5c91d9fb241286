"""The planner as a worker uses it: the order of calls, bounds, skipping, and requests that come and go.

Bug classes: a planner that reads this step, one whose plan does not say all that decides, a disabled request that gets a
window, a running mean that anticipates. Strength: behaviour over scripted loads; the laws are in tests/law, probes in
test_probes.
"""

from __future__ import annotations

import numpy as np
import pytest

from dspark_scheduler import (
    POLICIES,
    AdditiveCostModel,
    ContextSurvival,
    DraftShape,
    OnlineCostModel,
    Plan,
    Planner,
    Static,
    Terms,
    allocate_windows,
    best_budget,
    survival,
)

GAMMA = 4


def cost(draft: float = 0.1) -> AdditiveCostModel:
    return AdditiveCostModel(1.0, ([1], [0.0]), ([1, 8, 80], [0.0, 0.3, 7.5]), head=([1, 64], [draft, 4 * draft]))


def new(policy: str = "causal", model=None, **options) -> Planner:
    return Planner(GAMMA, cost() if model is None else model, POLICIES[policy], **options)


def best(values: np.ndarray, model: AdditiveCostModel) -> Plan:
    return best_budget(values[None], Terms.of(model, DraftShape("block", GAMMA), len(values)))


def same(a: Plan, b: Plan) -> bool:
    """Whether two plans decide and expect the same."""
    return a.numbers.tolist() == b.numbers.tolist() and a.expected_tokens == pytest.approx(b.expected_tokens)


def run(planner: Planner, steps: range, requests: int, confidence: float) -> list[Plan]:
    """Steps of a server whose confidence is the same everywhere; the plans."""
    plans = []
    for step in steps:
        ids = list(range(requests))
        plans.append(planner.plan(step, ids))
        if not plans[-1].skip_draft:
            now = survival(np.full((requests, GAMMA), confidence))
            planner.policy.windows(plans[-1], now if planner.policy.reads == "tokens" else None)
            planner.publish(step, ids, now)
    return plans


def test_a_plan_follows_what_was_published_two_steps_before():
    plans = run(new(), range(4), 2, 0.05)
    assert same(plans[0], plans[1])  # the prior
    assert plans[0].tokens > 0 and plans[2].skip_draft
    fresh = new()
    run(fresh, range(2), 2, 0.9)
    assert same(fresh.plan(2, [0, 1]), best(survival(np.full((2, GAMMA), 0.9)), cost()))


def test_a_report_that_comes_just_before_the_step_after_next_is_planned_is_in_time():
    """The order of an accelerator's step: t + 1 is planned and launched before the report of t is read."""
    late, early, plans, reports = new(), new(), [], []
    for step in range(20):
        ids = ["a", "b", "c"][: 2 + step % 2]
        if step >= 2:
            late.publish(*reports[step - 2])
        plans.append((late.plan(step, ids), early.plan(step, ids)))
        reports.append((step, ids, survival(np.full((len(ids), GAMMA), 0.5 + 0.02 * step))))
        early.publish(*reports[step])
    assert all(same(*pair) for pair in plans)
    assert len({plan.expected_tokens for plan, _ in plans}) > 10
    with pytest.raises(ValueError, match="after step 17"):
        late.publish(17, ["a"], np.ones((1, GAMMA)))
    late.plan(20, ["a"])
    with pytest.raises(ValueError, match="set forward"):
        late.publish(18, ["a"], np.ones((1, GAMMA)))


def test_windows_spend_the_budget_by_todays_survival_and_lagged_by_the_old_one():
    old, now = survival(np.array([[0.9] * 4, [0.1] * 4])), survival(np.array([[0.1] * 4, [0.9] * 4]))
    for policy, values in (("causal", now), ("lagged", old)):
        planner = new(policy)
        for step in range(2):
            planner.plan(step, ["a", "b"])
            planner.publish(step, ["a", "b"], old)
        plan = planner.plan(2, ["a", "b"])
        got = planner.policy.windows(plan, now) if policy == "causal" else plan.windows
        assert got.tolist() == allocate_windows(values, plan.tokens).tolist() and plan.tokens > 0
        with pytest.raises((TypeError, ValueError), match="by an array|are known"):
            planner.policy.windows(plan, None if policy == "causal" else now)


def test_ahead_chooses_its_budget_by_todays_survival_and_refuses_to_guess():
    planner = new("ahead", drafting="windows")
    plan = planner.plan(0, [0, 1])
    now = survival(np.array([[0.9] * 4, [0.1] * 4]))
    windows = planner.policy.windows(plan, ContextSurvival(now, False))
    assert windows.tolist() == [plan.draft_length, 0] and plan.windows is None
    hopeless = ContextSurvival(survival(np.full((2, 4), 0.01)), False)
    assert planner.policy.windows(plan, hopeless).tolist() == [0, 0]
    with pytest.raises(TypeError, match="ContextSurvival"):
        planner.policy.windows(plan, now)


def test_static_verifies_all_that_the_bounds_allow():
    planner = Planner(GAMMA, cost(), Static(), drafting="depth")
    plan = planner.plan(0, [0, 1, 2], 0, np.zeros(3, int), np.array([4, 0, 3]))
    assert plan.windows.tolist() == [4, 0, 3] == planner.policy.windows(plan).tolist()
    assert (plan.tokens, plan.draft_length, plan.skip_draft) == (7, 4, False)
    assert planner.plan(1, [0, 1], 0, np.zeros(2, int), np.zeros(2, int)).skip_draft
    assert not any(p.probe for p in run(Planner(GAMMA, OnlineCostModel(cost()), Static()), range(100), 2, 0.0))


def test_bounds_of_single_requests_hold_and_a_disabled_one_gets_nothing():
    planner = new(model=cost(0.0))
    plan = planner.plan(0, [0, 1, 2, 3], 0, np.array([0, 2, 0, 0]), np.array([0, 4, 2, 3]))
    windows = planner.policy.windows(plan, survival(np.full((4, GAMMA), 0.99)))
    assert windows[0] == 0 and windows[1] >= 2 and windows[2] in (1, 2) and 1 <= windows[3] <= 3
    assert windows.sum() == plan.tokens
    everyone_off = new().plan(0, [0, 1], 0, 0, np.zeros(2, int))
    assert everyone_off.skip_draft and everyone_off.windows.tolist() == [0, 0]
    with pytest.raises(ValueError, match="must be a number >= 0 or one per request"):
        new().plan(0, [0, 1], 0, np.zeros(3, int))
    with pytest.raises(ValueError, match="must be a number >= 0 or one per request"):
        new().plan(0, [0, 1], 0, -1)


def test_bounds_may_change_between_steps():
    planner = new(model=cost(0.0))
    assert planner.plan(0, [0]).tokens > 1
    assert planner.plan(1, [0], 0, 0, 1).tokens == 1
    planner.max_step_seconds = 1.05
    assert planner.plan(2, [0]).step_seconds <= 1.05


@pytest.mark.parametrize("policy", POLICIES)
def test_a_plans_numbers_make_the_same_step_on_every_rank(policy):
    """Ranks whose costs differ plan different steps; after adopting the first one's they verify the same windows."""
    now = survival(np.array([[0.9] * 4, [0.5] * 4, [0.3] * 4]))
    first, other = new(policy), new(policy, cost(2.0))
    for planner in (first, other):
        for step in range(2):
            planner.plan(step, "abc")
            planner.publish(step, "abc", now)
    plan, own = first.plan(2, "abc"), other.plan(2, "abc")
    assert plan.tokens > 0 == own.tokens
    adopted = other.adopt(plan.numbers)
    assert adopted.numbers.tolist() == plan.numbers.tolist()
    reads = {"tokens": now, "context": ContextSurvival(now, False), "nothing": None}[first.policy.reads]
    if policy != "ahead":  # whose K is each rank's own: its windows are agreed on afterwards
        assert other.policy.windows(adopted, reads).tolist() == first.policy.windows(plan, reads).tolist()
    else:
        assert len(adopted.seconds) == len(plan.seconds) and other.policy.windows(adopted, reads).sum() <= 12
    assert first.adopt(own.numbers).windows.tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="nothing was planned"):
        new().adopt(plan.numbers)


def test_positions_that_were_not_drafted_fall_as_the_running_mean_does():
    planner = new()
    planner.plan(0, [0])
    planner.publish(0, [0], np.array([[0.8, 0.6]]))
    planner.plan(1, [0])
    planner.publish(1, [0], np.empty((1, 0)))  # a block of no drafts says nothing
    got = planner.relay.read(3, [0]).values[0, 0]
    np.testing.assert_allclose(got, [0.8, 0.6, 0.6 * 0.7, 0.6 * 0.7**2])


def test_new_requests_take_the_running_mean_of_their_position():
    planner = new()
    run(planner, range(200), 8, 0.5)
    np.testing.assert_allclose(planner.running_mean, 0.5 ** np.arange(1, 5), atol=0.02)
    newcomers = planner.plan(200, list(range(100, 108)))
    assert same(newcomers, best(np.tile(planner.running_mean, (8, 1)), cost()))


def test_the_running_mean_follows_the_youngest_step_that_may_be_read():
    planner = new()
    run(planner, range(10), 2, 0.5)
    run(planner, range(10, 11), 2, 0.9)
    before = planner.running_mean.copy()
    run(planner, range(11, 12), 2, 0.5)
    assert (planner.running_mean <= before).all()  # step 10 is too young for step 11
    before = planner.running_mean.copy()
    run(planner, range(12, 13), 2, 0.5)
    assert (planner.running_mean > before).all()


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="drafting 'all'"):
        new(drafting="all")
    with pytest.raises(ValueError, match="block size 0"):
        Planner(0, cost(), POLICIES["causal"])
    with pytest.raises(ValueError, match="requests >= 1"):
        new().plan(0, [])
    zero = np.zeros(1, int)
    with pytest.raises(ValueError, match="inconsistent plan"):
        Plan(1, 1.0, 1.0, 1, zero, zero)
    with pytest.raises(ValueError, match="do not spend"):
        Plan(1, 1.0, 1.0, 1, zero, zero + 1, windows=zero)
