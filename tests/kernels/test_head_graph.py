"""The captured head against the eager one: the same callable, over the static buffers that a capture would bake in.

Bug class: a padded row that changes a live one, a parameter of an earlier batch that stays in its buffer, a law of greedy
requests kept where others sample, a block of the wrong requests. Capture itself needs CUDA and has not run.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang_dspark.drafter import Drafter

from dspark_kernels import head_graph
from dspark_kernels.confidence import ConfidenceHead, block_confidence
from dspark_kernels.head_graph import HeadGraphs, captured_head
from dspark_kernels.markov import HEADS, sample_block
from dspark_kernels.random import draw_noise
from dspark_kernels.types import AcceptRule, RequestRules, SamplingRows

GAMMA, WIDTH, VOCAB, RANK = 3, 16, 40, 8
GREEDY, PLAIN, FILTERED = (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 12, 0.8, 0.05)


def draft(kind: str | None = "vanilla", support: int | None = None, confidence: bool = True):
    """The parts of a draft that the head needs, with random weights."""
    torch.manual_seed(0)
    columns = support or VOCAB
    weight = torch.randn(columns, WIDTH)
    head = None if kind is None else HEADS[kind](VOCAB, RANK, WIDTH, columns).requires_grad_(False)
    return SimpleNamespace(
        markov_head=head,
        base_logits=lambda states: states @ weight.t(),
        confidence_head=ConfidenceHead(WIDTH, 0 if head is None else RANK).requires_grad_(False)
        if confidence
        else None,
        draft_token_ids=None if support is None else torch.randperm(VOCAB)[:support],
    )


def step(number: int, parameters: list[tuple], rule: AcceptRule = AcceptRule.BLOCK):
    """A step of requests with (temperature, top_k, top_p, min_p) each."""
    requests = len(parameters)
    rules = [AcceptRule.GREEDY if p[0] == 0 else rule for p in parameters]
    seeds = torch.arange(requests) + 100 * number
    noise = draw_noise(seeds, torch.full_like(seeds, number), seeds, GAMMA, RequestRules.of(rules))
    return SimpleNamespace(size=requests, anchors=seeds % VOCAB, rows=SamplingRows.of(*zip(*parameters)), noise=noise)


def eager(model, states, now):
    base = model.base_logits(states.flatten(0, 1)).view(now.size, GAMMA, -1)
    return sample_block(model.markov_head, base, states, now.anchors, now.rows, now.noise, model.draft_token_ids)


@pytest.mark.parametrize(
    ("kind", "support"), [("vanilla", None), ("gated", None), ("rnn", 24), ("vanilla", 24), (None, None)]
)
def test_blocks_of_batches_that_grow_and_shrink_are_the_eager_heads(kind, support):
    model = draft(kind, support)
    graphs = HeadGraphs(model, GAMMA, torch.zeros(GAMMA, WIDTH), 8, capture=False)
    assert graphs.tiers == (1, 2, 4, 8)
    batches = [[PLAIN] * 7, [GREEDY] * 5, [FILTERED, GREEDY, PLAIN], [GREEDY], [PLAIN, FILTERED], [GREEDY, PLAIN] * 4]
    for number, parameters in enumerate(batches):
        now, states = step(number, parameters), torch.randn(len(parameters), GAMMA, WIDTH)
        assert graphs.takes(now.anchors, now.noise, GAMMA)
        block, confidence = graphs.draw(states, now.anchors, now.rows, now.noise)
        expected = eager(model, states, now)
        assert torch.equal(block.tokens, expected.tokens) and torch.equal(block.columns, expected.columns)
        assert torch.allclose(confidence, block_confidence(model, states, now.anchors, block.tokens), atol=1e-5)
        assert (block.probs is None) == (expected.probs is None) == now.rows.all_greedy
        if block.probs is not None:
            assert torch.allclose(block.probs, expected.probs, atol=1e-6)


def test_short_blocks_seeded_requests_and_larger_batches_are_left_to_the_eager_head():
    graphs = HeadGraphs(draft(), GAMMA, torch.zeros(GAMMA, WIDTH), 2, capture=False)

    def taken(parameters, length=GAMMA, rule=AcceptRule.BLOCK):
        now = step(0, parameters, rule)
        return graphs.takes(now.anchors, now.noise, length)

    assert taken([PLAIN, GREEDY])
    assert not taken([PLAIN, GREEDY], GAMMA - 1)
    assert not taken([PLAIN] * 3)
    assert not taken([PLAIN], rule=AcceptRule.COUPLED)


def test_a_replay_that_draws_other_tokens_is_never_used(caplog, monkeypatch):
    """What no machine here can run is compared on the machine that does."""
    monkeypatch.setattr(
        head_graph.RaggedGraph,
        "_replay",
        lambda graph, tier: {name: value.flip(0) for name, value in graph.function(**graph._arguments(tier)).items()},
    )
    with caplog.at_level("WARNING", logger=head_graph.__name__):  # an engine of another test may have raised the level
        assert captured_head(draft(), GAMMA, torch.zeros(GAMMA, WIDTH), 4) is None
    assert "replayed blocks differ" in caplog.text


def test_a_failed_capture_leaves_the_eager_head(caplog, monkeypatch):
    def fail(graphs):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(HeadGraphs, "capture_all", fail)
    with caplog.at_level("WARNING", logger=head_graph.__name__):  # an engine of another test may have raised the level
        assert captured_head(draft(), GAMMA, torch.zeros(GAMMA, WIDTH), 4) is None
    assert "not permitted" in caplog.text


@pytest.mark.parametrize("confidence", [True, False])
def test_the_drafter_proposes_the_same_with_graphs_and_without(confidence):
    model = draft(confidence=confidence)
    drafter = Drafter.__new__(Drafter)
    drafter.model, drafter.ranks, drafter.head_graphs = model, SimpleNamespace(alone=True), None
    now, states = step(1, [PLAIN, GREEDY, FILTERED]), torch.randn(3, GAMMA, WIDTH)
    block, logits = drafter.propose(states, now, GAMMA)
    drafter.head_graphs = captured_head(model, GAMMA, torch.zeros(GAMMA, WIDTH), 4)
    assert drafter.head_graphs is not None
    replayed, again = drafter.propose(states, now, GAMMA)
    assert torch.equal(block.tokens, replayed.tokens)
    assert (logits is None) == (again is None) == (not confidence)
    assert logits is None or abs(logits - again).max() < 1e-5
