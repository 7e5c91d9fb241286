"""The budget: the true maximum over all K, tiers, bounds, ceilings, skipping, and evidence that cannot anticipate.

Bug classes: an early stop in front of a cost cliff, an off-by-one at a tier, a bound that the cost does not see,
drafting that loses to plain decoding. Strength: brute force over every K (and every draft length) with plain Python
sums.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_scheduler import AdditiveCostModel, ContextSurvival, LaggedSurvival, best_budget, plan_budget, survival

from .test_survival_and_windows import matrices, oracle

quick = settings(max_examples=120, deadline=None)


class BlocksPaid:
    """A cost model whose draft pays for its block by length, whatever is drawn from it, as a server's does."""

    def __init__(self, model: AdditiveCostModel, price: float) -> None:
        self.step_seconds, self.model, self.price = model.step_seconds, model, price

    def draft_seconds(self, slots, length=None):
        return self.model.draft_seconds(slots) + self.price * length


@st.composite
def costs(draw):
    """Cost models with jumps, tiers or neither, with and without a draft, whose blocks may have a price."""
    rises = draw(st.lists(st.sampled_from([0.0, 0.05, 0.3, 1.0]), min_size=7, max_size=7))
    theta = ([1, 2, 4, 7, 11, 16, 26], np.cumsum(rises))
    tiers = draw(st.sampled_from([(), (2, 5, 9, 14, 30), (8, 16)]))
    draft = draw(st.sampled_from([None, ([1, 10], [0.05, 0.2]), ([1], [0.6])]))
    model = AdditiveCostModel(1.0, ([1, 5], [0.0, 0.2]), theta, tiers, 0.001, draft)
    price = draw(st.sampled_from([0.0, 0.02, 0.2]))
    return BlocksPaid(model, price) if price else model


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
            seconds += float(cost.draft_seconds(slots, length))
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
    got = best_budget(
        values, cost, min_window=low, max_window=high, max_step_seconds=limit, context=context, drafting=drafting
    )
    choices = brute_force(values, cost, low_used, np.broadcast_to(high, requests), context, drafting, limit)
    if drafting != "block":  # the least length keeps every minimum
        choices = {key: rate for key, rate in choices.items() if key[0] >= np.max(low_used)}
    if np.max(high) == 0:
        choices = {}
    plain = requests / float(cost.step_seconds(requests, requests, context))
    best = max(choices.values(), default=-np.inf)
    if got.skip_draft:
        assert plain >= best - 1e-9 and got.tokens == got.draft_length == 0
        assert np.max(low_used) == 0
    elif choices:
        assert got.expected_tokens / got.step_seconds == pytest.approx(best, rel=1e-6)
        assert np.max(low_used) > 0 or best > plain - 1e-9
        if limit is not None:
            assert got.step_seconds <= limit


def test_the_search_crosses_a_cliff_that_stops_algorithm_1():
    cost = AdditiveCostModel(0.0, ([1], [0.0]), ([1, 2, 3, 4], [1.0, 2.1, 2.15, 2.2]))
    assert best_budget(np.array([[0.9, 0.85, 0.8]]), cost).tokens == 3


def test_the_last_tier_is_filled_because_padding_is_free():
    cost = AdditiveCostModel(1.0, ([4], [0.0]), ([4, 64], [0.0, 6.0]), tiers=(8, 16, 32, 64))
    values = survival(np.linspace(0.5, 0.95, 28).reshape(4, 7))
    assert 4 + best_budget(values, cost).tokens in (8, 16, 32)


@pytest.mark.parametrize("tiers", [(), (64, 96, 128, 192, 256)])
@pytest.mark.parametrize("floor", [0, 2])
def test_comparing_the_ends_of_tiers_is_comparing_every_budget(tiers, floor):
    """At sizes where brute force is slow: Algorithm 1 without `break`, one running sum over all entries."""
    cost = AdditiveCostModel(1.0, ([1], [0.0]), ([32, 100, 512], [0.0, 0.3, 6.0]), tiers, draft=([1, 224], [0.1, 0.2]))
    for seed in range(20):
        values = survival(np.random.default_rng(seed).beta(5, 2, (32, 7)).astype(np.float32))
        ladder = np.sort(values[:, floor:].ravel())[::-1]
        expected = 32 + values[:, :floor].sum(dtype=np.float64) + np.cumsum([0.0, *ladder])
        tokens = 32 * (1 + floor) + np.arange(len(expected))
        seconds = cost.step_seconds(32, tokens) + cost.draft_seconds(224)
        best = int(np.argmax(expected / seconds))
        got = best_budget(values, cost, min_window=floor, allow_skip=False)
        assert got.tokens == 32 * floor + best < 224
        assert got.expected_tokens == pytest.approx(expected[best]) and got.step_seconds == seconds[best]


def test_a_draft_that_cannot_be_accepted_is_left_out_even_where_padding_is_free():
    cost = AdditiveCostModel(1.0, ([1], [0.0]), ([1, 8], [0.0, 0.1]), tiers=(8,))
    assert best_budget(np.array([[0.9, 0.5, 0.0, 0.0]]), cost).tokens == 2
    assert best_budget(np.array([[[0.9, 0.5, 0.0, 0.0]], [[0.9, 0.5, 0.1, 0.0]]]), cost).tokens == 3


def test_only_evidence_that_cannot_anticipate_is_accepted():
    cost = AdditiveCostModel(1.0, ([1], [0.0]), ([1], [0.0]))
    values = np.array([[0.9, 0.5]])
    with pytest.raises(TypeError, match="array"):
        plan_budget(values, cost)
    with pytest.raises(ValueError, match="too young"):
        LaggedSurvival(values, step=4, now=5)
    with pytest.raises(ValueError, match="reads drafted tokens"):
        ContextSurvival(values, reads_drafted_tokens=True)
    assert plan_budget(LaggedSurvival(values, 3, 5), cost).tokens == 2
    assert plan_budget(ContextSurvival(values, reads_drafted_tokens=False), cost).tokens == 2


def test_requests_without_history_take_the_running_mean_and_not_ones():
    cost = AdditiveCostModel(1.0, ([1], [0.0]), ([2, 3, 4, 6], [0.0, 0.3, 0.6, 1.2]))
    evidence = LaggedSurvival(np.array([[0.9, 0.8], [np.nan, np.nan]]), 0, 2)
    assert plan_budget(evidence, cost, missing=np.array([0.1, 0.05])).tokens == 2
    assert plan_budget(evidence, cost, missing=np.array([0.9, 0.9])).tokens == 4
    with pytest.raises(ValueError, match="request 1 has no history"):
        plan_budget(evidence, cost)


def test_drafting_is_skipped_when_plain_decoding_wins_unless_a_minimum_demands_it():
    cost = AdditiveCostModel(1.0, ([1], [0.0]), ([1, 3], [0.0, 1.0]), draft=([1], [0.5]))
    values = np.array([[0.3, 0.1]])
    skipped = best_budget(values, cost)
    assert skipped.skip_draft and skipped.step_seconds == 1.0 and skipped.expected_tokens == 1.0
    assert best_budget(values, cost, min_window=1).tokens == 1
    assert not best_budget(values, cost, allow_skip=False).skip_draft
    assert best_budget(values, cost, max_window=0).skip_draft


def test_a_ceiling_nothing_meets_gives_the_cheapest_step():
    cost = AdditiveCostModel(1.0, ([1], [0.0]), ([1, 3], [0.0, 1.0]))
    got = best_budget(np.array([[0.9, 0.9]]), cost, max_step_seconds=0.5, allow_skip=False)
    assert got.tokens == 0 and got.step_seconds == 1.0


@pytest.mark.parametrize("bad", [[[0.5, np.nan]], [[np.nan, np.nan]], [[1.5, 0.2]], [[0.5, -0.5]]])
def test_survival_that_is_no_probability_is_refused(bad):
    cost = AdditiveCostModel(1.0, ([1], [0.0]), ([1], [0.0]))
    for low in (0, 1):
        with pytest.raises(ValueError, match="0, 1"):
            best_budget(np.array(bad), cost, min_window=low)
        with pytest.raises(ValueError, match="0, 1"):
            best_budget(np.array([[[0.5, 0.5]], bad, [[0.1, 0.1]]]), cost, min_window=low)


def test_empty_batches_and_unknown_drafting_are_refused():
    cost = AdditiveCostModel(1.0, ([1], [0.0]), ([1], [0.0]))
    with pytest.raises(ValueError, match="requests >= 1"):
        best_budget(np.empty((0, 3)), cost)
    with pytest.raises(ValueError, match="drafting 'all'"):
        best_budget(np.array([[0.5]]), cost, drafting="all")


def test_a_block_that_has_run_is_paid_for_and_its_length_no_longer_chosen():
    """Catches a plan after the draft that still weighs shorter blocks, or leaves out what the block cost."""
    values, cost = (
        np.array([[0.9, 0.1, 0.09]]),
        BlocksPaid(AdditiveCostModel(1.0, ([1], [0.0]), ([1, 9], [0.0, 0.1])), 0.2),
    )
    open_, run = best_budget(values, cost, drafting="windows"), best_budget(values, cost, drafting="windows", block=3)
    assert (open_.draft_length, open_.tokens) == (1, 1)
    assert (run.draft_length, run.tokens) == (3, 3)
    assert run.step_seconds == pytest.approx(1.0 + 3 * 0.0125 + 3 * 0.2)
    unsure = best_budget(np.array([[0.9, 0.1, 0.0]]), cost, drafting="windows", block=3)
    assert (unsure.draft_length, unsure.tokens) == (3, 2), "the block is three long, whatever is verified of it"
