"""The planner as a worker uses it: the order of calls, bounds, skipping and probing, and requests that come and go.

Bug classes: a planner that reads this step, one that never drafts again after it stopped, a disabled request that gets
a window, a running mean that anticipates. Strength: behaviour over scripted loads; the laws are in tests/law.
"""

from __future__ import annotations

import numpy as np
import pytest

from dspark_scheduler import (
    AdditiveCostModel,
    ContextSurvival,
    OnlineCalibrator,
    OnlineCostModel,
    Planner,
    ProbeClock,
    ProbeSchedule,
    allocate_windows,
    best_budget,
    survival,
)

GAMMA = 4


def cost(draft: float = 0.1) -> AdditiveCostModel:
    return AdditiveCostModel(1.0, ([1], [0.0]), ([1, 8, 80], [0.0, 0.3, 7.5]), draft=([1, 64], [draft, 4 * draft]))


def run(planner: Planner, steps: range, requests: int, confidence: float):
    """Steps of a server whose confidence is the same everywhere; the budgets."""
    budgets = []
    for step in steps:
        ids = list(range(requests))
        budgets.append(planner.budget(step, ids))
        now = survival(np.full((requests, GAMMA), confidence))
        planner.windows(now)
        if not budgets[-1].skip_draft:
            planner.publish(step, ids, now)
    return budgets


def test_a_budget_follows_what_was_published_two_steps_before():
    planner = Planner(GAMMA, cost())
    budgets = run(planner, range(4), 2, 0.05)
    assert budgets[0] == budgets[1]  # the prior
    assert budgets[0].tokens > 0 and budgets[2].skip_draft
    fresh = Planner(GAMMA, cost())
    run(fresh, range(2), 2, 0.9)
    expected = best_budget(survival(np.full((2, GAMMA), 0.9)), cost())
    assert fresh.budget(2, [0, 1]) == expected


def test_windows_spend_the_budget_by_todays_survival_and_lagged_by_the_old_one():
    old, now = survival(np.array([[0.9] * 4, [0.1] * 4])), survival(np.array([[0.1] * 4, [0.9] * 4]))
    for policy, values in (("causal", now), ("lagged", old)):
        planner = Planner(GAMMA, cost(), policy=policy)
        for step in range(2):
            planner.budget(step, ["a", "b"])
            planner.publish(step, ["a", "b"], old)
        budget = planner.budget(2, ["a", "b"])
        got = planner.windows(now if policy == "causal" else None)
        assert got.tolist() == allocate_windows(values, budget.tokens).tolist() and budget.tokens > 0
        with pytest.raises(ValueError, match="windows of policy"):
            planner.windows(None if policy == "causal" else now)


def test_ahead_uses_todays_survival_and_refuses_to_guess():
    planner = Planner(GAMMA, cost(), policy="ahead", drafting="windows")
    now = survival(np.array([[0.9] * 4, [0.1] * 4]))
    with pytest.raises(ValueError, match="context_survival=False"):
        planner.budget(0, [0, 1])
    budget = planner.budget(0, [0, 1], context_survival=ContextSurvival(now, False))
    assert planner.windows().tolist() == allocate_windows(now, budget.tokens).tolist()


def test_bounds_of_single_requests_hold_and_a_disabled_one_gets_nothing():
    planner = Planner(GAMMA, cost(0.0), min_window=1, max_window=3)
    budget = planner.budget(0, [0, 1, 2, 3], min_window=np.array([0, 2, 0, 0]), max_window=np.array([0, 4, 2, 4]))
    windows = planner.windows(survival(np.full((4, GAMMA), 0.99)))
    assert windows[0] == 0 and windows[1] >= 2 and windows[2] in (1, 2) and windows[3] >= 1
    assert windows.max() <= 3 and windows.sum() == budget.tokens
    everyone_off = Planner(GAMMA, cost()).budget(0, [0, 1], max_window=np.zeros(2, int))
    assert everyone_off.skip_draft


def test_bounds_may_change_between_steps():
    planner = Planner(GAMMA, cost(0.0))
    assert planner.budget(0, [0]).tokens > 1
    planner.max_window = 1
    assert planner.budget(1, [0]).tokens == 1
    planner.max_window, planner.max_step_seconds = None, 1.05
    assert planner.budget(2, [0]).step_seconds <= 1.05


def test_plain_decoding_is_left_now_and_then_to_look_and_at_once_when_drafting_pays():
    planner = Planner(GAMMA, cost(0.4), probes=ProbeSchedule(4, 16))
    budgets = run(planner, range(200), 16, 0.05)
    probes = [step for step, budget in enumerate(budgets) if not budget.skip_draft]
    gaps = np.diff(probes)
    assert probes[0] == 4 and gaps[:2].tolist() == [9, 17] and set(gaps[2:]) == {17}
    assert all(budgets[step].tokens >= 16 for step in probes)
    first = Planner(GAMMA, cost(0.4), probes=ProbeSchedule(4, 16))
    assert [run(first, range(step, step + 1), 16, 0.05) and bool(first.probe_window) for step in range(6)] == [
        False
    ] * 4 + [
        True,
        False,
    ]
    back = run(planner, range(200, 230), 2, 0.95)
    assert not back[-1].skip_draft and sum(budget.skip_draft for budget in back) <= 25


def test_a_cost_model_that_learns_sees_a_plain_step_now_and_then():
    fixed, learning = (
        Planner(GAMMA, cost(0.0)),
        Planner(GAMMA, OnlineCostModel(cost(0.0)), plain_probes=ProbeSchedule(8, 32)),
    )
    assert not any(budget.skip_draft for budget in run(fixed, range(100), 2, 0.9))
    plain = [step for step, budget in enumerate(run(learning, range(130), 2, 0.9)) if budget.skip_draft]
    assert plain == [8, 25, 58, 91, 124]


def test_a_cost_model_that_learns_sees_a_window_more_and_a_window_less_now_and_then():
    """Whole windows for every request, so that a false step right beside the plan is met and not jumped over."""
    planner = Planner(
        GAMMA, OnlineCostModel(cost(0.0)), plain_probes=ProbeSchedule(500, 500), near_probes=ProbeSchedule(4, 8)
    )
    budgets = run(planner, range(60), 2, 0.8)
    probes = {step: budget.tokens for step, budget in enumerate(budgets) if budget.tokens != 6}
    assert probes == {4: 4, 13: 8, 22: 4, 31: 8, 40: 4, 49: 8, 58: 4}
    planner.max_step_seconds = float(planner.cost.step_seconds(2, 9))  # two rows per request fit, four do not
    assert max(budget.tokens for budget in run(planner, range(60, 120), 2, 0.8)) < 8


def test_the_probe_clock_starts_over_once_drafting_wins():
    clock = ProbeClock(ProbeSchedule(2, 8))
    assert [clock.due(True) for _ in range(8)] == [False, False, True, False, False, False, False, True]
    clock.due(False)
    assert [clock.due(True) for _ in range(3)] == [False, False, True]
    with pytest.raises(ValueError, match="first"):
        ProbeSchedule(9, 8)


def test_new_requests_take_the_running_mean_of_their_position():
    planner = Planner(GAMMA, cost())
    run(planner, range(200), 8, 0.5)
    np.testing.assert_allclose(planner.running_mean, 0.5 ** np.arange(1, 5), atol=0.02)
    newcomers = planner.budget(200, list(range(100, 108)))
    assert newcomers == best_budget(np.tile(planner.running_mean, (8, 1)), cost())


def test_the_running_mean_follows_the_youngest_step_that_may_be_read():
    planner = Planner(GAMMA, cost())
    run(planner, range(10), 2, 0.5)
    run(planner, range(10, 11), 2, 0.9)
    before = planner.running_mean.copy()
    run(planner, range(11, 12), 2, 0.5)
    assert (planner.running_mean <= before).all()  # step 10 is too young for step 11
    before = planner.running_mean.copy()
    run(planner, range(12, 13), 2, 0.5)
    assert (planner.running_mean > before).all()


def test_what_it_is_told_reaches_the_cost_model_and_the_calibrator():
    planner = Planner(GAMMA, OnlineCostModel(cost(), refit_every=4), calibrator=OnlineCalibrator(GAMMA, refit_every=4))
    for _ in range(40):
        planner.observe_step(4, 8, 0, 3.0, slots=16)
        planner.observe_acceptance(np.full((4, GAMMA), 2.0), np.zeros((4, GAMMA)), np.ones((4, GAMMA), bool))
    assert planner.cost.step_seconds(4, 8) + planner.cost.draft_seconds(16) == pytest.approx(3.0, rel=0.1)
    assert planner.calibrator.apply(np.full((1, GAMMA), 2.0)).max() < 0.3


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="policy 'oracle'"):
        Planner(GAMMA, cost(), policy="oracle")
    with pytest.raises(ValueError, match="block size 0"):
        Planner(0, cost())
    with pytest.raises(ValueError, match="need a budget first"):
        Planner(GAMMA, cost()).windows(np.ones((1, GAMMA)))
