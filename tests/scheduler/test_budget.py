"""The budget: the true maximum over all K, tiers, bounds, ceilings, skipping, and evidence that cannot anticipate.

Bug classes: an early stop in front of a cost cliff, an off-by-one at a tier, a bound that the cost does not see,
drafting that loses to plain decoding. Strength: brute force over every K (and every draft length) with plain Python
sums.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_scheduler import (
    POLICIES,
    AdditiveCostModel,
    ContextSurvival,
    DraftShape,
    LaggedSurvival,
    Plan,
    Terms,
    best_budget,
    plan_budget,
    survival,
)
from dspark_scheduler.budget import reference_budget

from .test_survival_and_windows import matrices, oracle

quick = settings(max_examples=120, deadline=None)


def terms(values: np.ndarray, cost, drafting: str = "block", **limits) -> Terms:
    """Terms for survival [.., R, γ]."""
    return Terms.of(cost, DraftShape(drafting, values.shape[-1]), values.shape[-2], **limits)


def best(values: np.ndarray, cost, drafting: str = "block", **limits) -> Plan:
    """The best budget on survival [R, γ], or on cases of it [H, R, γ]."""
    cases = values if values.ndim == 3 else values[None]
    return best_budget(cases, terms(values, cost, drafting, **limits))


def with_blocks(model: AdditiveCostModel, price: float) -> AdditiveCostModel:
    """The model, but its draft pays `price` for every row of its blocks, whatever is drawn from them."""
    return replace(model, block=([0, 1], [0.0, price]))


@st.composite
def costs(draw):
    """Cost models with jumps, tiers or neither, with and without a draft, whose blocks may have a price."""
    rises = draw(st.lists(st.sampled_from([0.0, 0.05, 0.3, 1.0]), min_size=7, max_size=7))
    theta = ([1, 2, 4, 7, 11, 16, 26], np.cumsum(rises))
    tiers = draw(st.sampled_from([(), (2, 5, 9, 14, 30), (8, 16)]))
    head = draw(st.sampled_from([None, ([1, 10], [0.05, 0.2]), ([1], [0.6])]))
    model = AdditiveCostModel(1.0, ([1, 5], [0.0, 0.2]), theta, tiers, 0.001, head)
    price = draw(st.sampled_from([0.0, 0.02, 0.2]))
    return with_blocks(model, price) if price else model


def brute_force(values, cost, low, high, context, drafting, limit):
    """(tokens per second, seconds) of every admissible choice, by (draft length, K)."""
    requests, gamma = values.shape
    found = {}
    for length in range(1, gamma + 1):
        if drafting == "block" and length < gamma:
            continue
        for budget in range(requests * gamma + 1):
            windows = oracle(values, budget, low, np.minimum(high, length))
            if sum(windows) != budget:
                continue
            tokens = requests + sum(float(values[r, j]) for r in range(requests) for j in range(windows[r]))
            slots = {"block": requests * gamma, "depth": requests * length, "windows": budget}[drafting]
            seconds = float(cost.step_seconds(requests, requests + budget, context))
            seconds += float(cost.draft_seconds(requests, slots, length))
            if limit is None or seconds <= limit:
                found[length, budget] = tokens / seconds
    return found


@quick
@given(matrices(4, 4), costs(), st.sampled_from(["block", "depth", "windows"]), st.data())
def test_no_choice_commits_more_tokens_per_second(confidence, cost, drafting, data):
    values = survival(confidence)
    requests, gamma = values.shape
    high = data.draw(
        st.one_of(
            st.just(gamma),
            st.integers(1, gamma),
            st.lists(st.integers(0, gamma), min_size=requests, max_size=requests).map(np.array),
        )
    )
    low = data.draw(st.sampled_from([0, 0, 1, 2]))
    limit = data.draw(st.sampled_from([None, None, 1.5, 2.5]))
    context = data.draw(st.sampled_from([0, 500]))
    low_used = np.minimum(low, np.minimum(high, gamma))
    got = best(values, cost, drafting, low=low, high=high, max_step_seconds=limit, context=context)
    choices = brute_force(values, cost, low_used, np.broadcast_to(high, requests), context, drafting, limit)
    if drafting != "block":  # the least length keeps every minimum
        choices = {key: rate for key, rate in choices.items() if key[0] >= np.max(low_used)}
    if np.max(high) == 0:
        choices = {}
    plain = requests / float(cost.step_seconds(requests, requests, context))
    most = max(choices.values(), default=-np.inf)
    if got.skip_draft:
        assert plain >= most - 1e-9 and got.tokens == got.draft_length == 0
        assert np.max(low_used) == 0
    elif choices:
        assert got.expected_tokens / got.step_seconds == pytest.approx(most, rel=1e-6)
        assert np.max(low_used) > 0 or most > plain - 1e-9
        if limit is not None:
            assert got.step_seconds <= limit


def test_the_search_crosses_a_cliff_that_stops_algorithm_1():
    cost = AdditiveCostModel(0.0, ([1], [0.0]), ([1, 2, 3, 4], [1.0, 2.1, 2.15, 2.2]))
    assert best(np.array([[0.9, 0.85, 0.8]]), cost).tokens == 3


def test_the_last_tier_is_filled_because_padding_is_free():
    cost = AdditiveCostModel(1.0, ([4], [0.0]), ([4, 64], [0.0, 6.0]), tiers=(8, 16, 32, 64))
    values = survival(np.linspace(0.5, 0.95, 28).reshape(4, 7))
    assert 4 + best(values, cost).tokens in (8, 16, 32)


@pytest.mark.parametrize("tiers", [(), (64, 96, 128, 192, 256)])
@pytest.mark.parametrize("floor", [0, 2])
def test_the_fast_search_is_the_papers(tiers, floor):
    """At sizes where brute force is slow: Algorithm 1 without `break`, one running sum over all entries."""
    cost = AdditiveCostModel(1.0, ([1], [0.0]), ([32, 100, 512], [0.0, 0.3, 6.0]), tiers, head=([1, 224], [0.1, 0.2]))
    for seed in range(20):
        values = survival(np.random.default_rng(seed).beta(5, 2, (32, 7)).astype(np.float32))
        tokens, rate = reference_budget(values, terms(values, cost, low=floor), 7)
        got = best(values, cost, low=floor)
        assert got.tokens == tokens < 224
        assert got.expected_tokens / got.step_seconds == pytest.approx(rate)


def test_a_draft_that_cannot_be_accepted_is_left_out_even_where_padding_is_free():
    cost = AdditiveCostModel(1.0, ([1], [0.0]), ([1, 8], [0.0, 0.1]), tiers=(8,))
    assert best(np.array([[0.9, 0.5, 0.0, 0.0]]), cost).tokens == 2
    assert best(np.array([[[0.9, 0.5, 0.0, 0.0]], [[0.9, 0.5, 0.1, 0.0]]]), cost).tokens == 3


def test_only_evidence_that_cannot_anticipate_is_accepted():
    cost = AdditiveCostModel(1.0, ([1], [0.0]), ([1], [0.0]))
    values, mean = np.array([[0.9, 0.5]]), np.array([0.9, 0.9])
    for policy in POLICIES.values():
        with pytest.raises(TypeError, match="array"):
            policy.plan(values[None], terms(values, cost), mean)
    with pytest.raises(ValueError, match="too young"):
        LaggedSurvival(values[None], step=4, now=5)
    with pytest.raises(ValueError, match="reads drafted tokens"):
        ContextSurvival(values, reads_drafted_tokens=True)
    assert plan_budget(LaggedSurvival(values[None], 3, 5), terms(values, cost), mean).tokens == 2
    plan = POLICIES["ahead"].plan(LaggedSurvival(values[None], 3, 5), terms(values, cost), mean)
    with pytest.raises(TypeError, match="array"):
        POLICIES["ahead"].windows(plan, values)
    assert POLICIES["ahead"].windows(plan, ContextSurvival(values, reads_drafted_tokens=False)).tolist() == [2]


def test_requests_without_history_take_the_running_mean_and_not_ones():
    cost = AdditiveCostModel(1.0, ([1], [0.0]), ([2, 3, 4, 6], [0.0, 0.3, 0.6, 1.2]))
    evidence = LaggedSurvival(np.array([[[0.9, 0.8], [np.nan, np.nan]]]), 0, 2)
    two = terms(evidence.values, cost)
    assert plan_budget(evidence, two, np.array([0.1, 0.05])).tokens == 2
    assert plan_budget(evidence, two, np.array([0.9, 0.9])).tokens == 4


def test_drafting_is_skipped_when_plain_decoding_wins_unless_a_minimum_demands_it():
    cost = AdditiveCostModel(1.0, ([1], [0.0]), ([1, 3], [0.0, 1.0]), head=([1], [0.5]))
    values = np.array([[0.3, 0.1]])
    skipped = best(values, cost)
    assert skipped.skip_draft and skipped.step_seconds == 1.0 and skipped.expected_tokens == 1.0
    assert best(values, cost, low=1).tokens == 1
    assert best(values, cost, high=0).skip_draft


def test_a_ceiling_nothing_meets_gives_the_cheapest_step():
    cost = AdditiveCostModel(1.0, ([1], [0.0]), ([1, 3], [0.0, 1.0]))
    got = best(np.array([[0.9, 0.9]]), cost, low=1, max_step_seconds=0.5)
    assert got.tokens == 1 and got.step_seconds == 1.5


@pytest.mark.parametrize("bad", [[[0.5, np.nan]], [[np.nan, np.nan]], [[1.5, 0.2]], [[0.5, -0.5]]])
def test_survival_that_is_no_probability_is_refused(bad):
    cost = AdditiveCostModel(1.0, ([1], [0.0]), ([1], [0.0]))
    for low in (0, 1):
        with pytest.raises(ValueError, match="0, 1"):
            best(np.array(bad), cost, low=low)
        with pytest.raises(ValueError, match="0, 1"):
            best(np.array([[[0.5, 0.5]], bad, [[0.1, 0.1]]]), cost, low=low)


def test_empty_batches_and_unknown_drafting_are_refused():
    cost = AdditiveCostModel(1.0, ([1], [0.0]), ([1], [0.0]))
    with pytest.raises(ValueError, match="requests >= 1"):
        best(np.empty((0, 3)), cost)
    with pytest.raises(ValueError, match="drafting 'all'"):
        best(np.array([[0.5]]), cost, "all")


def test_a_block_that_has_run_is_paid_for_and_its_length_no_longer_chosen():
    """Catches a plan after the draft that still weighs shorter blocks, or leaves out what the block cost."""
    cost = with_blocks(AdditiveCostModel(1.0, ([1], [0.0]), ([1, 9], [0.0, 0.1])), 0.2)
    old, now = np.array([[0.9, 0.8, 0.7]]), ContextSurvival(np.array([[0.9, 0.1, 0.09]]), False)
    ahead = POLICIES["ahead"]
    plan = ahead.plan(LaggedSurvival(old[None], 0, 2), terms(old, cost, "windows"), old[0])
    assert best(now.values, cost, "windows").draft_length == 1 and plan.draft_length == 3
    assert ahead.windows(plan, now).tolist() == [3]
    assert plan.seconds[3] == pytest.approx(1.0 + 3 * 0.0125 + 3 * 0.2)
    unsure = ContextSurvival(np.array([[0.9, 0.1, 0.0]]), False)
    assert ahead.windows(plan, unsure).tolist() == [2], "the block is three long, whatever is verified of it"


@quick
@given(matrices(4, 4), costs(), st.data())
def test_ahead_spends_the_best_budget_of_this_step_within_its_plan(confidence, cost, data):
    """The seconds that a plan hands out (to a device, say) lead to the K that the whole search finds."""
    values = survival(confidence)
    low, limit = data.draw(st.sampled_from([0, 0, 1])), data.draw(st.sampled_from([None, None, 1.5, 2.5]))
    two = terms(values, cost, "windows", low=low, context=200, max_step_seconds=limit)
    old = survival(np.full(values.shape, data.draw(st.sampled_from([0.6, 0.9, 1.0]))))
    plan = POLICIES["ahead"].plan(LaggedSurvival(old[None], 0, 2), two, old[0])
    if plan.skip_draft:
        return
    windows = POLICIES["ahead"].windows(plan, ContextSurvival(values, False))
    fixed = replace(two, low=plan.low, high=plan.high)
    _, rate = reference_budget(values, replace(fixed, max_step_seconds=None), plan.draft_length)
    got = len(values) + sum(float(values[r, : windows[r]].sum()) for r in range(len(values)))
    got /= float(fixed.seconds(range(windows.sum(), windows.sum() + 1), plan.draft_length)[0])
    if limit is None:
        assert got == pytest.approx(rate, rel=1e-6)
    elif np.isfinite(plan.seconds).sum() > 1:
        assert plan.seconds[windows.sum() - plan.low.sum()] <= limit
