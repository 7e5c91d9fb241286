"""Survival and allocation: prefixes, conservation, ties, bounds, and that a later token cannot move an earlier
decision.

Bug classes: a top-K whose ties depend on memory order, a window that is not a prefix, a bound that loses or invents
budget, an anticipating admission. Strength: Hypothesis over matrices full of ties (few distinct values, ones and zeros)
against a plain oracle that sorts a list; the non-anticipation test rewrites everything from a position on.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_scheduler import (
    POLICIES,
    AdditiveCostModel,
    DraftShape,
    LaggedSurvival,
    Terms,
    allocate_windows,
    plan_budget,
    survival,
)
from dspark_scheduler.baselines import early_stop_windows, floor_lookup_budget, threshold_windows

CONFIDENCE = st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.9, 1.0])
quick = settings(max_examples=150, deadline=None)


@st.composite
def matrices(draw, largest_r: int = 5, largest_gamma: int = 5):
    """Conditional confidences [R, γ], float32 or float64."""
    requests, gamma = draw(st.integers(1, largest_r)), draw(st.integers(1, largest_gamma))
    rows = draw(st.lists(st.lists(CONFIDENCE, min_size=gamma, max_size=gamma), min_size=requests, max_size=requests))
    return np.array(rows, draw(st.sampled_from([np.float32, np.float64])))


def oracle(values: np.ndarray, budget: int, low, high) -> list[int]:
    """Sort a list of (-survival, position, row) and hand out what is left after the minima."""
    requests, gamma = values.shape
    high = [min(int(h), gamma) for h in np.broadcast_to(high, requests)]
    low = [min(int(a), b) for a, b in zip(np.broadcast_to(low, requests), high)]
    entries = sorted((-values[r, j], j, r) for r in range(requests) for j in range(low[r], high[r]))
    windows = list(low)
    for _, _, r in entries[: max(0, budget - sum(low))]:
        windows[r] += 1
    return windows


@quick
@given(matrices())
def test_survival_is_the_running_product_and_never_rises(confidence):
    values = survival(confidence)
    assert values.dtype == confidence.dtype
    assert (values[:, 1:] <= values[:, :-1]).all() and ((values >= 0) & (values <= 1)).all()
    np.testing.assert_allclose(values[:, -1], confidence.prod(axis=1), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, -0.1, 1.5, np.inf])
def test_a_confidence_that_is_no_probability_is_refused_by_row(bad):
    confidence = np.full((4, 3), 0.5)
    confidence[2, 1] = bad
    with pytest.raises(ValueError, match="row 2 .*position 1"):
        survival(confidence)
    with pytest.raises(ValueError, match="matrix"):
        survival(np.array([0.5]))


@quick
@given(matrices(), st.integers(0, 30), st.data())
def test_windows_are_what_sorting_a_list_gives(confidence, budget, data):
    values = survival(confidence)
    requests = len(values)
    bound = st.one_of(
        st.integers(0, 6), st.lists(st.integers(0, 6), min_size=requests, max_size=requests).map(np.array)
    )
    low, high = data.draw(bound), data.draw(bound)
    windows = allocate_windows(values, budget, min_window=low, max_window=high)
    assert windows.tolist() == oracle(values, budget, low, high)
    assert windows.dtype == np.int64


def test_ties_go_to_the_earlier_position_and_then_to_the_lower_row():
    ones = np.ones((3, 2))
    got = [allocate_windows(ones, budget).tolist() for budget in range(7)]
    assert got == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 2, 2]]


@quick
@given(matrices(), st.integers(0, 30))
def test_the_budget_is_spent_to_the_last_token(confidence, budget):
    windows = allocate_windows(survival(confidence), budget)
    assert windows.sum() == min(budget, confidence.size)
    assert windows.min() >= 0 and windows.max() <= confidence.shape[1]


@quick
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 30), st.integers(0, 2**32 - 1))
def test_permuting_the_requests_permutes_the_windows(requests, gamma, budget, seed):
    rng = np.random.default_rng(seed)
    values = np.sort(rng.random((requests, gamma)), axis=1)[:, ::-1]  # no ties: those go by row
    order = rng.permutation(requests)
    assert allocate_windows(values[order], budget).tolist() == allocate_windows(values, budget)[order].tolist()


COST = AdditiveCostModel(
    0.3, ([1], [0.0]), ([1, 3, 4, 6, 7, 12, 30], [1.0, 1.1, 1.9, 2.0, 2.6, 3.5, 9.0]), tiers=(2, 4, 8, 12)
)


@quick
@given(matrices(), st.data())
def test_a_token_and_all_later_confidences_cannot_move_their_own_admission(confidence, data):
    """Position k of request r (0-based): rewriting the confidences after k, which read token k, leaves w > k alone."""
    requests, gamma = confidence.shape
    r, k = data.draw(st.integers(0, requests - 1)), data.draw(st.integers(0, gamma - 1))
    changed = confidence.copy()
    tail = data.draw(st.lists(CONFIDENCE, min_size=gamma - k - 1, max_size=gamma - k - 1))
    changed[r, k + 1 :] = tail
    evidence = LaggedSurvival(np.full((1, requests, gamma), np.nan), 0, 2)
    mean = np.cumprod(np.full(gamma, data.draw(CONFIDENCE)))
    cost = AdditiveCostModel(COST.t0, COST.alpha, COST.theta, data.draw(st.sampled_from([(), COST.tiers])))

    def windows(c):
        s = survival(c)
        terms = Terms.of(cost, DraftShape("block", gamma), requests)
        plans = {name: POLICIES[name].plan(evidence, terms, mean) for name in ("causal", "lagged")}
        return {
            "causal": POLICIES["causal"].windows(plans["causal"], None if plans["causal"].skip_draft else s),
            "lagged": POLICIES["lagged"].windows(plans["lagged"]),
            "early stop": early_stop_windows(s, cost),
            "threshold": threshold_windows(c, 0.6),
        }

    before, after = windows(confidence), windows(changed)
    for name in before:
        assert (before[name][r] > k) == (after[name][r] > k), name


def test_the_test_above_sees_a_retrospective_search():
    cost = AdditiveCostModel(0.0, ([1], [0.0]), ([1, 2, 3], [1.0, 2.0, 1 / 0.45]))

    def window(c2):
        s = survival(np.array([[0.8, c2]]))
        terms = Terms.of(cost, DraftShape("block", 2), 1)
        return allocate_windows(s, plan_budget(LaggedSurvival(s[None], 0, 2), terms, s[0]).tokens)[0]

    assert window(0.9) > 0 and window(0.0) == 0  # forged evidence: admission of position 0 moved with c2


def test_a_rising_or_undefined_survival_is_refused():
    for bad in ([[0.5, 0.6]], [[np.nan, 0.5]], [[0.5, np.nan]]):
        with pytest.raises(ValueError, match="never rise"):
            allocate_windows(np.array(bad), 1)
    with pytest.raises(ValueError, match="min_window"):
        allocate_windows(np.array([[0.5]]), 1, min_window=-1)
    with pytest.raises(ValueError, match="max_window"):
        allocate_windows(np.array([[0.5]]), 1, max_window=np.array([1, 2]))


def test_a_maximum_beats_a_minimum_and_a_disabled_request_gets_nothing():
    s = survival(np.full((3, 4), 0.9))
    windows = allocate_windows(s, 12, min_window=2, max_window=np.array([0, 1, 4]))
    assert windows.tolist() == [0, 1, 4]


def test_a_floor_look_up_stops_one_short_of_the_tier():
    """The defect that best_budget does not have: from the probe below, a tier's last-but-one slot looks cheapest."""
    s = survival(np.full((4, 4), 0.95))
    probes, speed = np.array([4, 8, 12, 20]), np.array([1.0, 0.7, 0.6, 0.3])
    assert 4 + floor_lookup_budget(s, probes, speed) in (7, 11, 19)
