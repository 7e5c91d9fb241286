"""Markov heads, block sampling and the confidence head. Separates a wrong equation (state, gate, which token biases
which position) from a recorded q that is not the law a token was drawn from.

Strength: heads against the literal equations to 1e-5; the recorded q against the law recomputed from drafted prefixes to
the last bit; a head that reads x_k instead of x_{k-1}, or forgets the anchor, moves logits by > 0.1.
"""

from __future__ import annotations

import pytest
import torch

from dspark_kernels import (
    HEADS,
    AcceptRule,
    ConfidenceHead,
    RequestRules,
    SamplingRows,
    StepNoise,
    draw,
    draw_noise,
    probabilities,
    sample_block,
    seeded_sample,
)
from dspark_kernels.confidence import confidence_reference

V, D, RANK = 23, 6, 4


def make_head(kind: str, draft_vocab: int | None = None):
    torch.manual_seed(0)
    return HEADS[kind](V, RANK, D, draft_vocab).requires_grad_(False)


def make_noise(rules: list[int], block: int) -> StepNoise:
    n = len(rules)
    seeds, steps, positions = torch.arange(n) + 100, torch.arange(n) * 3, torch.arange(n) * 7
    return draw_noise(seeds, steps, positions, block, RequestRules.of(rules))


def bias_reference(head, prev: int, hidden: torch.Tensor, state: torch.Tensor):
    """DSpark, Eq. 5 and 6, and the equation of DeepSpec's gated head, for one request and position."""
    e = head.markov_w1.weight[prev]
    if head.kind == "vanilla":
        return head.markov_w2.weight @ e, state
    if head.kind == "gated":
        gate = torch.sigmoid(head.gate_proj.weight @ torch.cat((hidden, e)) + head.gate_proj.bias)
        return head.markov_w2.weight @ (gate * e), state
    z = head.joint_proj.weight @ torch.cat((state, e, hidden)) + head.joint_proj.bias
    gate, candidate, output = torch.sigmoid(z[:RANK]), torch.tanh(z[RANK : 2 * RANK]), torch.tanh(z[2 * RANK :])
    return head.markov_w2.weight @ output, gate * state + (1 - gate) * candidate


@pytest.mark.parametrize("kind", sorted(HEADS))
@pytest.mark.parametrize("support", ["all", "shared"])
def test_a_block_is_sampled_left_to_right_from_exactly_the_recorded_law(kind, support):
    torch.manual_seed(1)
    rules = [AcceptRule.TOKEN, AcceptRule.GREEDY, AcceptRule.BLOCK, AcceptRule.COUPLED, AcceptRule.COUPLED]
    requests, block = len(rules), 4
    rows = SamplingRows.of([1.0, 0.0, 0.7, 1.0, 1.3], top_k=[-1, -1, 5, -1, 7])
    noise, anchors, hidden = make_noise(rules, block), torch.arange(requests), torch.randn(requests, block, D)
    base, ids = torch.randn(requests, block, V), None
    head = make_head(kind)
    if support == "shared":
        ids = torch.randperm(V)[:9]
        base, head = base[..., :9], make_head(kind, 9)
    draft = sample_block(head, base, hidden, anchors, rows, noise, ids)

    for r in range(requests):
        prev, state = int(anchors[r]), torch.zeros(RANK)
        for k in range(block):
            bias, state = bias_reference(head, prev, hidden[r, k], state)
            columns = torch.arange(base.shape[2]) if ids is None else ids
            logits = base[r, k] + bias
            one = SamplingRows.of([0.0 if rows.greedy[r] else float(rows.temperature[r])], [int(rows.top_k[r])])
            q = draft.probs[r, k]
            torch.testing.assert_close(q, probabilities(logits[None], one)[0], atol=1e-5, rtol=0)
            column, token = int(draft.columns[r, k]), int(draft.tokens[r, k])
            assert token == int(columns[column]) and q[column] > 0
            if rules[r] in (AcceptRule.TOKEN, AcceptRule.BLOCK):
                assert column == int(draw(q[None], noise.coins.draft[r : r + 1, k]))
            elif rules[r] is AcceptRule.COUPLED:  # the target's own noise: it would emit this token from these logits
                wide = torch.full((1, V), -torch.inf)
                wide[0, columns] = logits
                position = noise.positions[r : r + 1] + 1 + k
                assert token == int(seeded_sample(wide, one, noise.seeds[r : r + 1], position))
            else:
                assert column == int(logits.argmax())
            prev = token


def test_fewer_drafts_are_a_prefix_of_more():
    """`lagged` and `ahead` sample only what will be verified: k <= γ must not move a token."""
    torch.manual_seed(2)
    base, hidden, anchors = torch.randn(3, 6, V), torch.randn(3, 6, D), torch.arange(3)
    rows, noise = SamplingRows.of([1.0] * 3), make_noise([2, 1, 3], 6)
    whole = sample_block(make_head("rnn"), base, hidden, anchors, rows, noise)
    part = sample_block(make_head("rnn"), base[:, :2], hidden[:, :2], anchors, rows, noise)
    assert torch.equal(part.tokens, whole.tokens[:, :2]) and torch.equal(part.probs, whole.probs[:, :2])


def test_a_greedy_batch_drafts_the_same_tokens_as_one_hot_laws_would_and_records_none():
    torch.manual_seed(3)
    base, hidden, anchors = torch.randn(4, 5, V), torch.randn(4, 5, D), torch.arange(4)
    fast = sample_block(make_head("gated"), base, hidden, anchors, SamplingRows.of([0.0] * 4), make_noise([0] * 4, 5))
    mixed = SamplingRows.of([0.0, 0.0, 0.0, 0.0, 1.0])
    base5, hidden5, anchors5 = (torch.cat((x, x[:1])) for x in (base, hidden, anchors))
    slow = sample_block(make_head("gated"), base5, hidden5, anchors5, mixed, make_noise([0] * 4 + [1], 5))
    assert fast.probs is None
    assert torch.equal(fast.tokens, slow.tokens[:4])


def test_a_draft_without_a_head_proposes_from_its_own_logits():
    base = torch.randn(2, 3, V)
    draft = sample_block(
        None, base, torch.zeros(2, 3, D), torch.arange(2), SamplingRows.of([0.0] * 2), make_noise([0, 0], 3)
    )
    assert torch.equal(draft.tokens, base.argmax(dim=-1))


def test_parameters_carry_deepspecs_names():
    shapes = {kind: {n: tuple(p.shape) for n, p in make_head(kind, 9).named_parameters()} for kind in HEADS}
    common = {"markov_w1.weight": (V, RANK), "markov_w2.weight": (9, RANK)}
    assert shapes["vanilla"] == common
    assert shapes["gated"] == common | {"gate_proj.weight": (RANK, D + RANK), "gate_proj.bias": (RANK,)}
    assert shapes["rnn"] == common | {
        "joint_proj.weight": (3 * RANK, 2 * RANK + D),
        "joint_proj.bias": (3 * RANK,),
    }


@pytest.mark.parametrize("bias", [True, False])
def test_confidence_is_one_dot_product_of_hidden_and_previous_embedding(bias):
    torch.manual_seed(4)
    head = ConfidenceHead(D, RANK, bias).requires_grad_(False)
    hidden, embedding = torch.randn(2, 3, D), torch.randn(2, 3, RANK)
    logits = head(hidden, embedding)
    constant = float(head.proj.bias) if bias else 0.0
    for r in range(2):
        expected = confidence_reference(hidden[r], embedding[r], head.proj.weight[0], constant)
        torch.testing.assert_close(logits[r], expected, atol=1e-6, rtol=0)
    assert {n for n, _ in head.named_parameters()} == ({"proj.weight", "proj.bias"} if bias else {"proj.weight"})


def test_a_confidence_head_says_whether_it_reads_tokens_and_refuses_the_other_use():
    alone = ConfidenceHead(D)
    assert not alone.reads_tokens and ConfidenceHead(D, RANK).reads_tokens
    assert alone(torch.zeros(1, 2, D)).shape == (1, 2)
    with pytest.raises(ValueError, match="exactly when"):
        alone(torch.zeros(1, 2, D), torch.zeros(1, 2, RANK))
    with pytest.raises(ValueError, match="exactly when"):
        ConfidenceHead(D, RANK)(torch.zeros(1, 2, D))
