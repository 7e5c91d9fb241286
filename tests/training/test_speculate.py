"""The evaluation's own speculative decoding must be lossless, or its accepted lengths mean nothing.

Catches: laws, tokens and supports that are handed to the server's rules in the wrong order, features committed at wrong
positions (shows as a greedy text that differs). Strength: greedy text token for token over 12 prompts; the joint law of
two sampled tokens by chi-square over 6 000 texts, which a residual that forgets the draft's vocabulary fails. The rules
themselves are held by tests/kernels and tests/law: a bonus from a wrong row is too little for these texts to show.
"""

from __future__ import annotations

import pytest
import torch

from sglang_dspark.training.generate import Generator, Request
from sglang_dspark.training.model import TrainableDraft
from sglang_dspark.training.speculate import Speculator
from sglang_dspark.training.target import SlotView, Target
from tests.engine.tiny import tiny_target
from tests.training.drafts import random_draft


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    folder = tiny_target(tmp_path_factory.mktemp("llama"), "llama", hidden=32, words=64)
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


@pytest.mark.parametrize(
    ("rule", "changes"),
    [("token", {}), ("block", {}), ("token", {"draft_vocab_size": 20}), ("block", {"draft_vocab_size": 20})],
)
def test_sampled_text_follows_the_targets_own_law(target, rule, changes):
    """The joint law of the second and third token (the first comes from the prompt alone), cells of five and more."""
    n, temperature, draft = 6_000, 2.0, draft_for(target, block_size=2, **changes)
    prompts = [Request((5, 9, 3), temperature, 0, i) for i in range(n)]
    rounds = Speculator(target, draft, temperature, 3, rule=rule).run(prompts, batch=1000)
    first, second = torch.arange(64).repeat_interleave(64), torch.arange(64).repeat(64)
    ids = torch.cat((torch.tensor([[5, 9, 3]]).expand(64 * 64, -1), first[:, None], second[:, None]), 1)
    chance = torch.softmax(target.logits(target.forward(ids)[1][:, -3:]).double() / temperature, -1)
    chance = chance.view(64, 64, 3, 64)  # of the first token, the second after it, the third after both
    stops = sorted(target.stop_ids)
    start, following = chance[0, 0, 0].clone(), chance[:, 0, 1].clone()
    start[stops], following[:, stops] = 0, 0  # such a text has no third token
    law = torch.einsum("a,ab,abc->bc", start, following, chance[:, :, 2])
    texts = torch.tensor([text for text in rounds.sequences.values() if len(text) == 3])
    counts = torch.bincount(texts[:, 1] * 64 + texts[:, 2], minlength=64 * 64)
    expected = n * law.flatten()
    common = expected >= 5
    cells = int(common.sum())
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
    rest, expected_rest = counts[~common].sum(), expected[~common].sum()
    statistic += (rest - expected_rest) ** 2 / expected_rest
    assert cells > 50 and float(statistic - cells) < 5 * (2 * cells) ** 0.5
    assert len(set(rounds.accepted)) == 3, "blocks were accepted in part and whole"


def test_the_block_rule_accepts_at_least_as_much_as_the_token_rule(target):
    draft, prompts = draft_for(target), [Request((5, 9, 3), 1.0, 0, i) for i in range(1500)]
    means = {}
    for rule in ("token", "block"):
        rounds = Speculator(target, draft, 1.0, 6, rule=rule).run(prompts, batch=500)
        means[rule] = sum(rounds.accepted) / len(rounds.accepted)
    assert means["block"] > means["token"], means


def test_a_requests_text_depends_on_the_seed_and_its_index_alone(target):
    draft, prompts = draft_for(target), [Request((5, 9, 3 + i), 1.0, 0, i) for i in range(6)]
    together = Speculator(target, draft, 1.0, 12, seed=4).run(prompts, batch=6).sequences
    alone = Speculator(target, draft, 1.0, 12, seed=4).run(prompts, batch=1).sequences
    other = Speculator(target, draft, 1.0, 12, seed=5).run(prompts, batch=6).sequences
    assert together == alone and together != other


def test_the_overlap_is_the_chance_that_a_draft_is_accepted(target):
    rounds = Speculator(target, draft_for(target), 1.0, 2, seed=2).run(
        [Request((5, 9, 3), 1.0, 0, i) for i in range(4_000)], batch=1000
    )
    accepted = sum(a > 0 for a in rounds.accepted) / len(rounds.accepted)
    expected = sum(overlap[0] for overlap in rounds.overlap) / len(rounds.overlap)
    assert accepted == pytest.approx(expected, abs=0.03)
