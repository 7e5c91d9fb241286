"""The fast acceptance against the plain rules, decision by decision, with given coins. Separates a wrong formula from a
wrong index (a row of a neighbour, the bonus row of a cut window, a slot past the window) and from a wrong grouping.

Strength: about 700 random requests in mixed batches, token for token; any rule replaced by another, a residual without its
scale, or a window that is ignored fails within the first ten batches.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_kernels import (
    AcceptRule,
    BlockDraft,
    Coins,
    RaggedBatch,
    RequestRules,
    SamplingRows,
    StepNoise,
    Verified,
    accept,
    draw_noise,
    probabilities,
    reference,
    sample_block,
    seeded_sample,
)

SETTINGS = settings(max_examples=120, deadline=None, derandomize=True)
RULES = list(AcceptRule)


class Step:
    """One random step: a mixed batch that was drafted, packed and verified, ready to be judged."""

    def __init__(self, seed: int, rules: list[int], block: int, vocab: int, support: bool = False):
        torch.manual_seed(seed)
        self.rules, self.block, self.vocab, n = rules, block, vocab, len(rules)
        temperature = [0.0 if rule == AcceptRule.GREEDY else 0.7 + 0.3 * (i % 3) for i, rule in enumerate(rules)]
        self.rows = SamplingRows.of(temperature, top_p=[(1.0, 0.8137)[i % 2] for i in range(n)])
        self.groups = RequestRules.of(rules)
        self.positions = torch.randint(0, 500, (n,))
        seeds, steps = torch.randint(-(2**62), 2**62, (n,)), torch.randint(0, 99, (n,))
        self.noise = draw_noise(seeds, steps, self.positions, block, self.groups)
        self.anchors = torch.randint(0, vocab, (n,))
        base, ids = torch.randn(n, block, vocab), None
        if support:
            ids, base = torch.randperm(vocab)[:4], base[..., :4]
        hidden = torch.zeros(n, block, 1)
        self.draft = sample_block(None, base, hidden, self.anchors, self.rows, self.noise, ids)
        self.full_logits = torch.randn(n, block + 1, vocab) * 1.5

    def judge(self, windows: list[int], padding: int = 0):
        """Verify these windows: packs, gives the ragged rows of the target's logits, poisons the padding, accepts."""
        total = sum(windows) + len(windows)
        batch = RaggedBatch.pack(
            self.anchors, self.draft.tokens, torch.tensor(windows), self.positions, tier=total + padding
        )
        logits = torch.full((batch.rows, self.vocab), torch.nan)
        logits[:total] = self.full_logits[batch.row_to_request, batch.row_to_column][:total]
        return accept(Verified(logits, batch, self.draft, self.rows, self.noise))

    def p(self, r: int) -> torch.Tensor:
        return probabilities(self.full_logits[r], self.rows.expand(torch.full((self.block + 1,), r)))

    def q(self, r: int) -> torch.Tensor:
        q, ids = torch.zeros(self.block, self.vocab), self.draft.support
        columns = torch.arange(self.vocab) if ids is None else ids
        for k in range(self.block):
            q[k, columns] = self.draft.probs[r, k]
        return q

    def expected(self, r: int, window: int) -> list[int]:
        """What the plain rule commits for request r."""
        drafts = self.draft.tokens[r].tolist()
        rule = AcceptRule(self.rules[r])
        own = self.full_logits[r].argmax(dim=-1).tolist()
        if rule is AcceptRule.COUPLED:
            n = self.block + 1
            seeds, positions = self.noise.seeds[r].expand(n), self.positions[r] + 1 + torch.arange(n)
            own = seeded_sample(self.full_logits[r], self.rows.expand(torch.full((n,), r)), seeds, positions).tolist()
        if rule in (AcceptRule.GREEDY, AcceptRule.COUPLED):
            return list(reference.accept_own(own, drafts, window).tokens)
        given = reference.GivenCoins(self.noise.coins.accept[r].tolist(), self.noise.coins.final[r].tolist())
        judge = reference.RULES[rule.name.lower()]
        return list(judge(self.p(r).tolist(), self.q(r).tolist(), drafts, window, given).tokens)


@SETTINGS
@given(st.integers(0, 2**31), st.lists(st.sampled_from(RULES), min_size=1, max_size=8), st.integers(1, 6),
       st.sampled_from([5, 9, 64]), st.booleans(), st.data())  # fmt: skip
def test_every_request_of_a_mixed_batch_commits_what_the_plain_rule_commits(seed, rules, block, vocab, support, data):
    step = Step(seed, rules, block, vocab, support)
    windows = [data.draw(st.integers(0, block)) for _ in rules]
    result = step.judge(windows, padding=data.draw(st.integers(0, 3)))
    for r, window in enumerate(windows):
        committed = step.expected(r, window)
        length = int(result.lengths[r])
        assert result.tokens[r].tolist() == committed + [0] * (block + 1 - length), AcceptRule(rules[r]).name
        assert 1 <= length == len(committed) <= window + 1
        assert bool(result.acceptance[r, window:].isnan().all()), "a slot that was not verified has no label"
        if rules[r] != AcceptRule.COUPLED and step.draft.probs is not None:
            overlap = torch.minimum(step.p(r)[:block], step.q(r)).sum(dim=1)[:window]
            torch.testing.assert_close(result.acceptance[r, :window], overlap, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rule", [AcceptRule.TOKEN, AcceptRule.BLOCK])
def test_hundreds_of_requests_of_one_rule_commit_what_the_plain_rule_commits(rule):
    """Windows of every length, so that each threshold of the block rule decides some of them."""
    step = Step(3, [rule] * 400, 4, 6)
    windows = [i % 5 for i in range(400)]
    result = step.judge(windows)
    for r, window in enumerate(windows):
        assert result.tokens[r, : int(result.lengths[r])].tolist() == step.expected(r, window)


@pytest.mark.parametrize("rule", [AcceptRule.GREEDY, AcceptRule.TOKEN, AcceptRule.COUPLED])
def test_a_cap_truncates_what_the_full_block_emits(rule):
    """The law of the bonus row is judged on the drafted token: fresh sampling there would fail this within a few rows."""
    step = Step(7, [rule] * 200, 5, 6)
    full = step.judge([5] * 200)
    for window in range(5):
        cut = step.judge([window] * 200)
        for r in range(200):
            n = int(cut.lengths[r])
            assert n == min(int(full.lengths[r]), window + 1)
            assert torch.equal(cut.tokens[r, :n], full.tokens[r, :n])


def test_nothing_of_a_request_depends_on_the_batch_beside_it():
    step = Step(9, [rule for rule in RULES for _ in range(5)], 4, 12)
    windows = [i % 5 for i in range(20)]
    together = step.judge(windows)
    for r in range(20):
        one = Step(9, step.rules, 4, 12)
        keep = torch.tensor([r])
        one.rules, one.groups = [step.rules[r]], RequestRules.of([step.rules[r]])
        one.anchors, one.positions, one.rows = step.anchors[keep], step.positions[keep], step.rows.expand(keep)
        one.draft, one.full_logits = step.draft.select(keep), step.full_logits[keep]
        coins = Coins(*(getattr(step.noise.coins, name)[keep] for name in ("draft", "accept", "final")))
        one.noise = StepNoise(step.noise.seeds[keep], step.positions[keep], one.groups, coins)
        alone = one.judge([windows[r]])
        assert torch.equal(alone.tokens[0], together.tokens[r])


def two_uniform_laws(requests: int, accept_coin: torch.Tensor):
    """k = 1, V = 16: p uniform over all tokens, q over tokens 0-3, both exact in float32, so p/q = 1/4 exactly."""
    q_logits = torch.full((requests, 1, 16), -torch.inf)
    q_logits[..., :4] = 0.0
    groups = RequestRules.of([AcceptRule.TOKEN] * requests)
    zero = torch.zeros(requests, dtype=torch.int64)
    noise = draw_noise(torch.arange(requests), zero, zero, 1, groups)
    coins = Coins(noise.coins.draft, accept_coin[:, None].expand(-1, 2).contiguous(), noise.coins.final)
    return q_logits, StepNoise(noise.seeds, zero, groups, coins), groups


@pytest.mark.parametrize("rule", [AcceptRule.TOKEN, AcceptRule.BLOCK])
def test_a_coin_that_equals_the_threshold_rejects(rule):
    """u < h, not u <= h: with coins on the grid {0, 1/4, 1/2, 3/4} the acceptance of ratio 1/4 is exactly 1/4.

    `<=` accepts half of them: with the 4 000 rows here the chi-square of the emitted law goes from 12 to about 4 000.
    """
    n = 4000
    coins = (torch.arange(n) % 4).double() / 4
    q_logits, noise, _ = two_uniform_laws(n, coins)
    groups = RequestRules.of([rule] * n)
    noise = StepNoise(noise.seeds, noise.positions, groups, noise.coins)
    rows, zero = SamplingRows.of([1.0] * n), torch.zeros(n, dtype=torch.int64)
    draft = sample_block(None, q_logits, torch.zeros(n, 1, 1), zero, rows, noise)
    batch = RaggedBatch.pack(zero, draft.tokens, zero + 1, zero)
    result = accept(Verified(torch.zeros(2 * n, 16), batch, draft, rows, noise))
    assert int((result.lengths == 2).sum()) == n // 4


@pytest.mark.parametrize("rule", [AcceptRule.TOKEN, AcceptRule.BLOCK])
def test_a_token_that_the_target_excludes_is_never_accepted_even_by_a_coin_of_zero(rule):
    groups, zero = RequestRules.of([rule]), torch.zeros(1, dtype=torch.int64)
    coins = Coins(*torch.zeros(3, 1, 2, dtype=torch.float64))
    noise = StepNoise(zero, zero, groups, coins)
    q = torch.tensor([[[1.0, 0.0, 0.0]]])
    draft = BlockDraft(zero[:, None], zero[:, None], q)
    logits = torch.tensor([[-torch.inf, 0.0, 0.0], [0.0, 0.0, 0.0]])  # a grammar mask on the drafted token
    batch = RaggedBatch.pack(zero, draft.tokens, zero + 1, zero)
    result = accept(Verified(logits, batch, draft, SamplingRows.of([1.0]), noise))
    assert result.lengths.tolist() == [1] and int(result.tokens[0, 0]) == 1


def test_a_draft_that_equals_the_target_is_accepted_whole_whatever_the_coins():
    for rule in (AcceptRule.TOKEN, AcceptRule.BLOCK):
        step = Step(11, [rule] * 50, 4, 8)
        step.rows = SamplingRows.of([1.0] * 50)
        step.full_logits[:, :4] = step.draft.probs.log()
        assert step.judge([4] * 50).lengths.tolist() == [5] * 50


def test_mismatched_inputs_are_refused():
    step = Step(1, [AcceptRule.TOKEN], 2, 5)
    batch = RaggedBatch.pack(step.anchors, step.draft.tokens, torch.tensor([1]), step.positions)
    two = Step(1, [AcceptRule.TOKEN] * 2, 2, 5)
    with pytest.raises(ValueError, match="different batches"):
        Verified(torch.zeros(2, 5), batch, step.draft, step.rows, two.noise)
    greedy = BlockDraft(step.draft.tokens, step.draft.columns, None)
    with pytest.raises(ValueError, match="has no q"):
        Verified(torch.zeros(2, 5), batch, greedy, step.rows, step.noise)
    with pytest.raises(ValueError, match="need coins"):
        StepNoise(step.noise.seeds, step.positions, step.groups, None)
