"""The evaluation's own speculative decoding must be lossless, or its accepted lengths mean nothing.

Catches: a residual that forgets tokens outside the draft's vocabulary, features committed at wrong positions (shows as
a
greedy text that differs), a bonus drawn from the wrong row. Strength: greedy text token for token over 12 prompts; the
law of the emitted pair of tokens by chi-square with 40 000 rounds (the planted bug "residual without clamp" gives
thousands against a bound of about 90).
"""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sglang_dspark.training.generate import Generator, Request
from sglang_dspark.training.model import TrainableDraft
from sglang_dspark.training.speculate import Speculator, judge, law
from sglang_dspark.training.target import SlotView, Target
from tests.training.drafts import random_draft


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    from tests.training.test_train_draft import save_word_tokenizer

    folder = tmp_path_factory.mktemp("llama")
    save_word_tokenizer(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        eos_token_id=2,
        bos_token_id=1,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return Target(folder, (0, 2), dtype=torch.float32)


def draft_for(target: Target, **changes) -> TrainableDraft:
    raw = dict(random_draft(7, "LlamaDSparkModel", **changes).raw, vocab_size=64)
    torch.manual_seed(3)
    draft = TrainableDraft(raw, target.embedding, target.lm_head)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
        if draft.config.restricted:
            draft.draft_token_ids.copy_(torch.randperm(64)[: draft.config.support_size])
    return draft.eval()


def requests(count: int) -> list[Request]:
    torch.manual_seed(4)
    return [Request(tuple(torch.randint(3, 64, (3 + i % 5,)).tolist()), 0.0, 0, i) for i in range(count)]


@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": 20, "markov_head_type": "rnn"}])
def test_greedy_text_equals_the_targets_own(target, changes):
    prompts, plain = requests(12), {}
    Generator(target, 5, 20, 16, lambda e: plain.update({e.index: e.tokens[e.prompt_length :].tolist()})).run(prompts)
    rounds = Speculator(target, draft_for(target, **changes), 0.0, 20).run(prompts, batch=4)
    for index, text in plain.items():
        assert rounds.sequences[index] == text
    assert sum(rounds.committed) == sum(len(t) - 1 for t in rounds.sequences.values())


def test_slots_give_the_features_of_one_plain_forward(target):
    ids = torch.randint(3, 64, (2, 9))
    features, final = target.forward(ids)
    cache = target.new_cache(3, 80)
    rows = torch.tensor([2, 0])
    first = target.forward(ids[:, :5], SlotView.at(cache, torch.arange(5).expand(2, -1), rows))
    rest = target.forward(ids[:, 5:], SlotView.at(cache, torch.arange(5, 9).expand(2, -1), rows))
    torch.testing.assert_close(torch.cat([first[0], rest[0]], 1), features, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat([first[1], rest[1]], 1), final, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_two_tokens_follow_the_targets_joint_law_under_either_rule(rule):
    torch.manual_seed(6)
    n, v = 200_000, 4
    draft = random_draft(1, vocab_size=v, mask_token_id=0, block_size=2)
    first, second = law(torch.randn(v), 1.0), law(torch.randn(v, v) * 1.5, 1.0)  # p(x), p(y | x)
    q_first, q_second = law(torch.randn(v), 1.0), law(torch.randn(v, v), 1.0)
    x = torch.multinomial(q_first, n, True)
    tokens = torch.stack([x, torch.multinomial(q_second[x], 1)[:, 0]], 1)
    p = torch.stack([first.expand(n, -1), second[x], torch.full((n, v), 1 / v)], 1)
    q = torch.stack([q_first.expand(n, -1), q_second[x]], 1)
    accepted, bonus, _ = judge(p, q, tokens, draft, rule=rule)
    one = torch.where(accepted > 0, x, bonus)
    plain = torch.multinomial(second[one], 1)[:, 0]  # a block that ends after one token goes on as plain decoding
    two = torch.where(accepted == 2, tokens[:, 1], torch.where(accepted == 1, bonus, plain))
    counts, expected = torch.bincount(one * v + two, minlength=v * v), n * (first[:, None] * second).flatten()
    assert float(((counts - expected) ** 2 / expected).sum()) < 45  # 15 degrees of freedom: p about 1e-4


def test_the_block_rule_accepts_at_least_as_much_as_the_token_rule():
    torch.manual_seed(8)
    n, v, gamma = 20_000, 6, 4
    draft = random_draft(1, vocab_size=v, mask_token_id=0, block_size=gamma)
    p, q = law(torch.randn(n, gamma + 1, v), 1.0), law(torch.randn(n, gamma, v), 1.0)
    tokens = torch.multinomial(q.flatten(0, 1), 1).view(n, gamma)
    means = {rule: float(judge(p, q, tokens, draft, rule=rule)[0].float().mean()) for rule in ("token", "block")}
    assert means["block"] > means["token"] + 0.02, means


def test_the_emitted_pair_follows_the_targets_law_with_a_restricted_draft(target):
    torch.manual_seed(5)
    n, v = 40_000, 6
    draft = random_draft(1, draft_vocab_size=3, block_size=1)
    draft.draft_token_ids.copy_(torch.tensor([0, 2, 5]))
    p = law(torch.randn(1, 2, v) * 1.5, 1.0)
    q = law(torch.randn(1, 1, 3), 1.0)
    tokens = draft.token_ids(torch.multinomial(q[0, 0], n, True))[:, None]
    accepted, bonus, overlap = judge(p.expand(n, -1, -1), q.expand(n, -1, -1), tokens, draft)
    first = torch.where(accepted > 0, tokens[:, 0], bonus)
    counts, expected = torch.bincount(first, minlength=v), n * p[0, 0]
    assert float(((counts - expected) ** 2 / expected).sum()) < 25  # 5 degrees of freedom: p about 1e-4
    after = torch.bincount(bonus[accepted > 0], minlength=v)
    expected = after.sum() * p[0, 1]
    assert float(((after - expected) ** 2 / expected).sum()) < 25
    assert float(accepted.float().mean()) == pytest.approx(float(overlap[0]), abs=0.02)
