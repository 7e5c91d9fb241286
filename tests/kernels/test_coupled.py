"""Seeded requests. Separates "the text has the right law" from "the text is the seeded sampler's own": the latter is an
equality, token for token, for any draft, window, filter and neighbour, and it is what a user's seed promises.

Strength: 300 random blocks; noise indexed by rank or by row, a position off by one, or noise that sees the draft fails in
the first few. No float64 buffer of a vocabulary row is made on the way (a dispatch mode watches every tensor).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from dspark_kernels import (
    AcceptRule,
    BlockDraft,
    RaggedBatch,
    RequestRules,
    SamplingRows,
    Verified,
    accept,
    draw_noise,
    sample_block,
    seeded_sample,
)

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)
COUPLED = AcceptRule.COUPLED


def parameters(n: int) -> SamplingRows:
    options = [(1.0, -1, 1.0, 0.0), (0.7, 40, 1.0, 0.0), (1.3, -1, 0.9, 0.0), (1.0, 20, 0.8, 0.05), (0.0, -1, 1.0, 0.0)]
    return SamplingRows.of(*zip(*[options[i % len(options)] for i in range(n)], strict=True))


def one_row(rows: SamplingRows, r: int) -> SamplingRows:
    return rows.expand(torch.tensor([r]))


@SETTINGS
@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 5), st.sampled_from([11, 128, 1000]), st.data())
def test_the_committed_tokens_are_the_seeded_samplers_own(seed, requests, block, vocab, data):
    """Any draft: half of the drafted tokens are what the sampler will say, so that all lengths occur."""
    torch.manual_seed(seed)
    rows, rules = parameters(requests), RequestRules.of([COUPLED] * requests)
    seeds, positions = torch.randint(-(2**62), 2**62, (requests,)), torch.randint(0, 4000, (requests,))
    noise = draw_noise(seeds, torch.zeros(requests, dtype=torch.int64), positions, block, rules)
    logits = torch.randn(requests, block + 1, vocab) * 3
    own = torch.stack(
        [
            torch.cat([
                seeded_sample(logits[r, j : j + 1], one_row(rows, r), seeds[r : r + 1], positions[r : r + 1] + 1 + j)
                for j in range(block + 1)
            ])
            for r in range(requests)
        ]
    )  # fmt: skip
    tokens = torch.where(torch.rand(requests, block) < 0.7, own[:, :-1], torch.randint(0, vocab, (requests, block)))
    windows = torch.tensor([data.draw(st.integers(0, block)) for _ in range(requests)])
    batch = RaggedBatch.pack(torch.zeros(requests, dtype=torch.int64), tokens, windows, positions)
    flat = logits[batch.row_to_request, batch.row_to_column]
    result = accept(Verified(flat, batch, BlockDraft(tokens, tokens, None), rows, noise))
    for r in range(requests):
        n = int(result.lengths[r])
        assert torch.equal(result.tokens[r, :n], own[r, :n])
        hit = (tokens[r] == own[r, :-1])[: int(windows[r])].int()
        assert n == int(hit.cumprod(dim=0).sum()) + 1


def test_a_coupled_draft_from_the_targets_own_law_is_always_accepted():
    """x = argmax(log q + g) with the target's g: with q = p every draft is the target's own token."""
    torch.manual_seed(1)
    n, block, vocab = 30, 4, 50
    rules, rows = RequestRules.of([COUPLED] * n), SamplingRows.of([1.0] * n)
    positions, zero = torch.arange(n) * 9, torch.zeros(n, dtype=torch.int64)
    noise = draw_noise(torch.arange(n) - 5, zero, positions, block, rules)
    base = torch.randn(n, block, vocab)
    draft = sample_block(None, base, torch.zeros(n, block, 1), zero, rows, noise)
    batch = RaggedBatch.pack(zero, draft.tokens, zero + block, positions)
    logits = torch.cat((base, torch.randn(n, 1, vocab)), dim=1)[batch.row_to_request, batch.row_to_column]
    assert accept(Verified(logits, batch, draft, rows, noise)).lengths.tolist() == [block + 1] * n


def test_coupling_accepts_at_least_what_its_bound_promises():
    """Acceptance of one draft is at least (1 - TV) / (1 + TV) (20 000 positions, 5 sigma below)."""
    torch.manual_seed(2)
    p, q = torch.softmax(torch.randn(12) * 1.5, 0), torch.softmax(torch.randn(12) * 1.5, 0)
    from dspark_kernels import race

    seeds, positions = torch.full((20_000,), 77), torch.arange(20_000)
    same = race(p.expand(20_000, -1), seeds, positions) == race(q.expand(20_000, -1), seeds, positions)
    distance = float((p - q).abs().sum() / 2)
    assert float(same.double().mean()) > (1 - distance) / (1 + distance) - 5 * 0.5 / 20_000**0.5
    assert float(same.double().mean()) < 1 - distance + 5 * 0.5 / 20_000**0.5, "no coupling accepts more than 1 - TV"


class WatchAllocations(TorchDispatchMode):
    """Records the largest tensor of each dtype that any operation returns."""

    def __init__(self):
        super().__init__()
        self.largest: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.largest[value.dtype] = max(self.largest.get(value.dtype, 0), value.numel())
        return result


@pytest.mark.parametrize("rule", [COUPLED, AcceptRule.TOKEN, AcceptRule.BLOCK])
def test_judging_needs_one_float32_buffer_and_the_seeded_noise_no_float64_row(rule):
    n, block, vocab = 16, 3, 32_768
    rules, rows = RequestRules.of([rule] * n), SamplingRows.of([1.0] * n)
    zero = torch.zeros(n, dtype=torch.int64)
    noise = draw_noise(torch.arange(n), zero, zero, block, rules)
    support = torch.arange(64)
    draft = sample_block(None, torch.randn(n, block, 64), torch.zeros(n, block, 1), zero, rows, noise, support)
    batch = RaggedBatch.pack(zero, draft.tokens, zero + block, zero)
    logits = torch.randn(batch.rows, vocab)
    with WatchAllocations() as watch:
        accept(Verified(logits, batch, draft, rows, noise))
    whole = batch.rows * vocab
    assert watch.largest[torch.float32] <= whole, "views of the logits themselves are the largest"
    if rule is COUPLED:
        assert watch.largest.get(torch.float64, 0) < vocab
        assert watch.largest[torch.int32] <= 1 << 18, "noise is made for a few rows at a time"
    else:  # the cumulative sums of one chunk's final draws: one row per request of it
        assert watch.largest[torch.float64] <= whole // (block + 1)
