"""One function of tensors draws a block for every mix of requests: the twin of the grouped head, token for token.

Bug classes: a request that draws by its neighbour's rule, noise of another step or position, a law of the wrong column, a
padded row that changes a live one, a static buffer that keeps what an earlier batch left. Strength: 120 random batches of
greedy, sampled, filtered and seeded requests, every head, with and without a support; static memory is poisoned before.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_kernels import (
    HEADS,
    AcceptRule,
    ConfidenceHead,
    DrawnBlock,
    RequestRules,
    RequestTensors,
    SamplingRows,
    draft_block,
    draw_noise,
    sample_block,
    sample_rows,
)
from dspark_kernels.confidence import block_confidence
from dspark_kernels.mixed import mixed_draw, mixed_law

SETTINGS = settings(max_examples=40, deadline=None, derandomize=True)
GAMMA, WIDTH, VOCAB, RANK = 3, 16, 70, 8
KINDS = {  # temperature, top_k, top_p, min_p, rule
    "greedy": (0.0, 0, 1.0, 0.0, AcceptRule.GREEDY),
    "plain": (1.0, 0, 1.0, 0.0, AcceptRule.BLOCK),
    "token": (0.8, 0, 1.0, 0.0, AcceptRule.TOKEN),
    "filtered": (0.7, 12, 0.8, 0.05, AcceptRule.BLOCK),
    "seeded": (1.2, 0, 1.0, 0.0, AcceptRule.COUPLED),
    "seeded and filtered": (1.0, 20, 0.9, 0.0, AcceptRule.COUPLED),
}


def draft(kind: str | None = "vanilla", support: int | None = None, confidence: bool = True):
    """The parts of a draft that the head needs, with random weights."""
    torch.manual_seed(0)
    columns = support or VOCAB
    weight = torch.randn(columns, WIDTH)
    head = None if kind is None else HEADS[kind](VOCAB, RANK, WIDTH, columns).requires_grad_(False)
    rank = 0 if head is None else RANK
    return SimpleNamespace(
        markov_head=head,
        base_logits=lambda states: states @ weight.t(),
        confidence_head=ConfidenceHead(WIDTH, rank).requires_grad_(False) if confidence else None,
        draft_token_ids=None if support is None else torch.randperm(VOCAB)[:support],
    )


class Batch:
    """Requests of the given kinds in their `number`-th step."""

    def __init__(self, kinds: list[str], number: int):
        parameters = [KINDS[kind] for kind in kinds]
        self.rules = RequestRules.of([p[4] for p in parameters])
        self.rows = SamplingRows.of(*zip(*[p[:4] for p in parameters], strict=True))
        self.seeds = torch.arange(len(kinds)) * 7919 + 100 * number
        self.steps = torch.full_like(self.seeds, number)
        self.positions = torch.arange(len(kinds)) * 31 + number
        self.anchors = (self.seeds + 3) % VOCAB
        self.states = torch.randn(len(kinds), GAMMA, WIDTH, generator=torch.Generator().manual_seed(number))
        self.noise = draw_noise(self.seeds, self.steps, self.positions, GAMMA, self.rules)
        self.requests = RequestTensors.of(self.rows, self.rules, self.seeds, self.steps)

    def grouped(self, model):
        base = model.base_logits(self.states.flatten(0, 1)).view(len(self.seeds), GAMMA, -1)
        return sample_block(
            model.markov_head, base, self.states, self.anchors, self.rows, self.noise, model.draft_token_ids
        )


def check(drawn: DrawnBlock, batch: Batch, model) -> None:
    expected = batch.grouped(model)
    assert torch.equal(drawn.tokens, expected.tokens) and torch.equal(drawn.columns, expected.columns)
    if expected.probs is not None:
        sampled = ~batch.rows.greedy
        assert torch.allclose(drawn.probs[sampled], expected.probs[sampled], atol=1e-6)
    if model.confidence_head is not None:
        assert torch.allclose(drawn.confidence, block_confidence(model, batch.states, batch.anchors, expected.tokens))


@SETTINGS
@given(
    st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=7),
    st.integers(0, 2**20),
    st.sampled_from([("vanilla", None), ("gated", None), ("rnn", 24), ("vanilla", 24), (None, None)]),
)
def test_a_mixed_batch_draws_what_its_groups_draw(kinds, number, head):
    batch, model = Batch(kinds, number), draft(*head)
    check(draft_block(model, batch.states, batch.anchors, batch.requests, batch.positions), batch, model)


def test_blocks_in_static_memory_forget_the_batches_before():
    """As a replay sees it: fixed buffers, batches that grow and shrink within a tier, padding that is greedy."""
    model, most = draft("rnn", 24), 6
    requests, out = RequestTensors.buffers(most, "cpu"), DrawnBlock.buffers(most, GAMMA, 24, "cpu")
    states, anchors, positions = torch.zeros(most, GAMMA, WIDTH), *torch.zeros(2, most, dtype=torch.int64)
    out.probs.fill_(torch.nan)

    def replay(tier: int) -> DrawnBlock:
        return draft_block(
            model, states[:tier], anchors[:tier], requests.first(tier), positions[:tier], out=out.first(tier)
        )

    batches = [["plain"] * 6, ["greedy"] * 3, ["seeded", "greedy", "filtered"], ["plain"], ["seeded and filtered"] * 5]
    for number, kinds in enumerate(batches):
        batch, count = Batch(kinds, number), len(kinds)
        requests.copy_(batch.requests)
        for buffer, value in ((states, batch.states), (anchors, batch.anchors), (positions, batch.positions)):
            buffer[:count] = value
        drawn = replay(most if number % 2 else max(count, 2))
        assert drawn.tokens.data_ptr() == out.tokens.data_ptr()
        check(drawn.first(count), batch, model)
        assert bool(requests.greedy[count:].all()) and not bool(requests.rule[count:].any())


@pytest.mark.parametrize("kinds", [["greedy"] * 3, ["seeded", "greedy"], ["plain", "filtered", "seeded", "greedy"]])
def test_a_plain_step_draws_the_same_by_row_and_by_group(kinds):
    batch = Batch(kinds, 5)
    logits = torch.randn(len(kinds), VOCAB)
    logits[0, 3] = torch.nan
    expected = sample_rows(logits, batch.rows, batch.noise)
    coins = torch.zeros(len(kinds), 1, dtype=torch.float64) if batch.noise.coins is None else batch.noise.coins.final
    law = mixed_law(logits, batch.rows, batch.rules.rule, coupled_raw=True)
    assert torch.equal(mixed_draw(logits, law, batch.rules.rule, coins, batch.seeds, batch.positions, 0), expected)


def test_the_law_by_row_is_that_by_group_also_where_logits_are_odd():
    """NaN, infinities, rows with nothing left, filters of every kind: to the last bit on what is not filtered."""
    import random

    from dspark_kernels import filtered_weights, probabilities
    from dspark_kernels.selfcheck import random_logits, random_rows

    g = random.Random(3)
    torch.manual_seed(3)
    for _ in range(150):
        count = g.randint(1, 5)
        logits, rows = random_logits(g, count, g.choice([1, 2, 17, 300, 3000])), random_rows(g, count, greedy=0.2)
        for raw, grouped in ((True, filtered_weights), (False, probabilities)):
            rule = torch.full((count,), int(AcceptRule.COUPLED), dtype=torch.int32)
            ours = mixed_law(logits, rows, rule, coupled_raw=raw)
            torch.testing.assert_close(ours, grouped(logits, rows), atol=1e-6, rtol=0)
