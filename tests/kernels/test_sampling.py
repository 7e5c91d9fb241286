"""The law of a row. Separates "the filter keeps the wrong tokens" (order, ties, joint against one after another, the
boundary token) from "the draw does not follow the recorded law" (inverse CDF off by one, a token of probability zero).

Strength: about 250 random rows against the plain reference and 72 against SGLang's own filter, V up to 20 000, so that the
candidate path, the bisection and the plain path are all taken; a token too many or too few moves an entry by > 1e-4.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_kernels import SamplingRows, draw, filtered_weights, probabilities
from dspark_kernels.filters import filter_rows
from dspark_kernels.sampling import _argmax_by_blocks, first_argmax, probabilities_reference
from dspark_kernels.selfcheck import random_logits, random_rows

SETTINGS = settings(max_examples=100, deadline=None, derandomize=True)


@SETTINGS
@given(st.integers(0, 2**31), st.sampled_from([1, 2, 3, 7, 16, 64, 100, 257, 3000]))
def test_the_law_is_the_reference_for_any_parameters_and_any_odd_logits(seed, vocab):
    g = random.Random(seed)
    torch.manual_seed(seed)
    count = g.randint(1, 4)
    logits, rows = random_logits(g, count, vocab), random_rows(g, count)
    before = logits.clone()
    law = probabilities(logits, rows)
    for i in range(count):
        temperature = 0.0 if rows.greedy[i] else float(rows.temperature[i])
        parameters = (temperature, int(rows.top_k[i]), float(rows.top_p[i]), float(rows.min_p[i]))
        expected = torch.tensor(probabilities_reference(logits[i].float().tolist(), *parameters))
        torch.testing.assert_close(law[i], expected, atol=3e-6, rtol=0)
    assert torch.equal(logits.nan_to_num(1.5), before.nan_to_num(1.5)), "the logits belong to the caller"


@pytest.mark.parametrize("spread", [0.3, 3.0, 9.0])
@pytest.mark.parametrize("vocab", [500, 20_000])
def test_the_filters_keep_what_sglangs_own_sampler_keeps(spread, vocab):
    """Flat, usual and peaked rows: SGLang's `top_k_top_p_min_p_sampling_from_probs_torch` hands out what it kept."""
    sampler = pytest.importorskip("sglang.srt.layers.sampler")
    torch.manual_seed(1)
    count = 12
    p = torch.softmax(torch.randn(count, vocab) * spread, dim=-1)
    top_k = torch.tensor([1 << 30, 5, 900, 1 << 30] * 3)
    top_p = torch.tensor([0.9, 1.0, 0.7, 0.999] * 3)
    min_p = torch.tensor([0.0] * 6 + [0.02, 0.3] * 3)
    kept = torch.zeros_like(p)
    for need_min_p in (False, True):
        some = min_p > 0 if need_min_p else min_p == 0
        _, weights, ids, _ = _sglang_filter(sampler, p[some], top_k[some], top_p[some], min_p[some], need_min_p)
        kept[some] = torch.zeros_like(weights).scatter_(1, ids.long(), weights)
    ours = filter_rows(p, top_k, top_p, min_p)
    # A flat row is bisected: its boundary may move by the rounding of one float32 sum, at most one token.
    different = (ours != kept).sum(dim=1)
    assert int(different.max()) <= (1 if spread < 1 else 0), different


def _sglang_filter(sampler, p, top_k, top_p, min_p, need_min_p):
    if not need_min_p:
        return sampler.top_k_top_p_min_p_sampling_from_probs_torch(
            p.clone(), top_k, top_p, min_p, False, None, None, return_filtered_probs=True
        )
    return sampler.top_k_top_p_min_p_sampling_from_probs_torch(
        p.clone(), top_k, top_p, min_p, True, None, None, return_filtered_probs=True
    )


def test_equal_probabilities_are_kept_in_the_order_of_their_ids():
    rows = SamplingRows.of([1.0, 1.0, 1.0], top_k=[3, -1, -1], top_p=[1.0, 0.45, 1.0], min_p=[0.0, 0.0, 1.0])
    law = probabilities(torch.zeros(3, 10), rows)
    assert law[0].tolist() == pytest.approx([1 / 3] * 3 + [0] * 7)
    assert (law[1] > 0).tolist() == [True] * 5 + [False] * 5  # mass before a token: 0, .1, .2, .3, .4 <= .45
    assert law[2].tolist() == pytest.approx([0.1] * 10)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("vocab", [5000, 80_000])
def test_a_row_means_the_same_alone_and_in_any_batch(vocab):
    """To the last bit where the seeded sampler looks (its text must not depend on a neighbour); torch parts the sum of one
    row that is wide enough among its threads, and of several rows none."""
    torch.manual_seed(2)
    logits = torch.randn(24, vocab) * torch.linspace(0.5, 8, 24)[:, None]
    parameters = ([0.0, 1.0, 0.7] * 8, [-1, 7, -1] * 8, [0.9, 1.0, 0.99] * 8, [0.0, 0.0, 0.1] * 8)
    together = filtered_weights(logits, SamplingRows.of(*parameters))
    for i in range(24):
        alone = filtered_weights(logits[i : i + 1], SamplingRows.of(*[[column[i]] for column in parameters]))
        assert torch.equal(alone[0], together[i]), i


def test_temperature_zero_and_top_k_one_are_one_hot_at_the_first_argmax():
    logits = torch.tensor([[1.0, 5.0, 5.0], [math.nan, 2.0, 3.0], [-math.inf] * 3, [math.inf, 0.0, math.inf]])
    rows = SamplingRows.of([0.0, 1.0, 0.0, 1.0], top_k=[-1, 1, -1, 1])
    assert rows.all_greedy
    assert probabilities(logits, rows).argmax(dim=1).tolist() == [1, 2, 0, 0]


def test_the_blocked_argmax_is_the_first_argmax():
    torch.manual_seed(3)
    x = torch.randint(0, 4, (50, 256)).float()
    assert torch.equal(_argmax_by_blocks(x), x.argmax(dim=1))
    x[7, 200] = math.nan
    assert torch.equal(first_argmax(x), x.nan_to_num(-math.inf).argmax(dim=1))


def test_a_draw_follows_the_recorded_row_at_every_edge_of_its_cdf():
    """Uniforms at, just below and just above each cumulative sum: `>` against `>=` shows here and nowhere else."""
    weights = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    edges = {0.0: 1, 0.25 - 2.0**-40: 1, 0.25: 3, 0.75 - 2.0**-40: 3, 0.75: 4, 1 - 2.0**-48: 4}
    uniforms = torch.tensor(list(edges), dtype=torch.float64)
    assert draw(weights.expand(len(edges), -1), uniforms).tolist() == list(edges.values())
    assert draw(3 * weights.expand(len(edges), -1), uniforms).tolist() == list(edges.values()), "weights, not laws"


@SETTINGS
@given(st.integers(0, 2**31))
def test_a_token_of_probability_zero_is_never_drawn(seed):
    g = random.Random(seed)
    torch.manual_seed(seed)
    weights = torch.rand(64, g.choice([1, 2, 50, 4000])) ** 20
    weights[weights < 1e-6] = 0.0
    weights[:, 0] += (weights.sum(dim=1) == 0).float()
    uniforms = torch.rand(64, dtype=torch.float64)
    uniforms[:2] = torch.tensor([0.0, 1 - 2.0**-53])
    assert bool((weights.gather(1, draw(weights, uniforms)[:, None]) > 0).all())


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": [-1.0]},
        {"temperature": [math.nan]},
        {"temperature": [1.0], "top_p": [0.0]},
        {"temperature": [1.0], "min_p": [1.5]},
        {"temperature": [1.0, 1.0], "top_k": [5]},
    ],
)
def test_impossible_parameters_are_refused(bad):
    with pytest.raises(ValueError):
        SamplingRows.of(**bad)


def test_rows_of_another_length_are_refused():
    with pytest.raises(ValueError, match="do not match"):
        probabilities(torch.zeros(3, 4), SamplingRows.of([1.0, 1.0]))
