"""The plain-torch draft against the paper's equations written once more, position by position, in numpy.

Catches: features at or after the anchor leaking into the block, blocks seeing each other, a wrong RoPE position, a
forgotten norm (all norm weights are random), K/V of context and block from different projections, head formulas with
swapped inputs. Strength: every logit of every head and both shapes is compared to 1e-4; each mistake listed was
planted once and moved some logit by more than 1e-2.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sglang_dspark.training.model import load_draft
from tests.training.drafts import random_draft


def _norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (1 if weight is None else weight)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _rope(x, position, theta):
    half = x.shape[-1] // 2
    angle = position * theta ** -(np.arange(half) * 2 / x.shape[-1])
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def paper_block(draft, features, anchor):
    """Hidden states [γ, d] of one block after features [n, m·d], as loops over the equations."""
    c, w = draft.config, {k: v.double().numpy() for k, v in draft.state_dict().items()}
    theta, n = draft.raw["rope_theta"], len(features)
    split = features.reshape(n, -1, c.hidden_size)
    if c.normalize_features:
        split = _norm(split, None, c.rms_norm_eps)
    context = _norm(split.reshape(n, -1) @ w["fc.weight"].T, w["hidden_norm.weight"], c.rms_norm_eps)
    embedding = draft.embedding.double().numpy()
    x = embedding[[anchor] + [c.mask_token_id] * (c.block_size - 1)]
    for layer in range(c.num_hidden_layers):
        p = f"layers.{layer}."
        block = _norm(x, w[p + "input_layernorm.weight"], c.rms_norm_eps)
        rows = [(context[i], i) for i in range(n)] + [(block[i], n + i) for i in range(c.block_size)]

        def head(vector, position, name, count, p=p):
            out = (w[p + f"self_attn.{name}_proj.weight"] @ vector).reshape(count, c.head_dim)
            if c.has_qk_norm and name != "v":
                out = _norm(out, w[p + f"self_attn.{name}_norm.weight"], c.rms_norm_eps)
            return out if name == "v" else _rope(out, position, theta)

        keys = np.stack([head(v, i, "k", c.num_key_value_heads) for v, i in rows])
        values = np.stack([head(v, i, "v", c.num_key_value_heads) for v, i in rows])
        out = np.zeros((c.block_size, c.num_attention_heads, c.head_dim))
        for slot in range(c.block_size):
            query = head(block[slot], n + slot, "q", c.num_attention_heads)
            for h in range(c.num_attention_heads):
                kv = h // (c.num_attention_heads // c.num_key_value_heads)
                scores = keys[:, kv] @ query[h] / np.sqrt(c.head_dim)
                weights = np.exp(scores - scores.max())
                out[slot, h] = (weights / weights.sum()) @ values[:, kv]
        x = x + out.reshape(c.block_size, -1) @ w[p + "self_attn.o_proj.weight"].T
        y = _norm(x, w[p + "post_attention_layernorm.weight"], c.rms_norm_eps)
        gate = y @ w[p + "mlp.gate_proj.weight"].T
        x = x + (gate * _sigmoid(gate) * (y @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
    return _norm(x, w["norm.weight"], c.rms_norm_eps)


def paper_bias(draft, previous, hidden):
    """B_k [γ, Vd] for the previous tokens of a block (the anchor first)."""
    c, w = draft.config, {k: v.double().numpy() for k, v in draft.state_dict().items()}
    w1, w2 = w["markov_head.markov_w1.weight"], w["markov_head.markov_w2.weight"]
    biases, state = [], np.zeros(c.markov_rank)
    for k in range(c.block_size):
        e = w1[previous[k]]
        if c.markov_head_type == "gated":
            z = np.concatenate([hidden[k], e])
            e = e * _sigmoid(w["markov_head.gate_proj.weight"] @ z + w["markov_head.gate_proj.bias"])
        if c.markov_head_type == "rnn":
            z = np.concatenate([state, e, hidden[k]])
            g, cand, o = np.split(w["markov_head.joint_proj.weight"] @ z + w["markov_head.joint_proj.bias"], 3)
            state, e = _sigmoid(g) * state + (1 - _sigmoid(g)) * np.tanh(cand), np.tanh(o)
        biases.append(w2 @ e)
    return np.stack(biases)


CASES = [
    {"architecture": "Qwen3DSparkModel"},
    {"architecture": "LlamaDSparkModel", "normalize_features": True, "draft_vocab_size": 20},
    {"markov_head_type": "gated"},
    {"markov_head_type": "rnn", "draft_vocab_size": 20},
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_a_draft_block_follows_the_papers_equations(case):
    draft = random_draft(1, **case)
    c = draft.config
    features, anchor = torch.randn(1, 7, 2 * c.hidden_size), 11
    with torch.no_grad():
        hidden, base = draft.draft_block(features, torch.tensor([anchor]))
        previous = torch.tensor([[anchor, 5, 9, 30]])
        latents = draft.markov_head.block_latents(previous, hidden)
        bias = draft.markov_head.markov_w2(latents)[0].numpy()
        confidence = draft.confidence_logits(hidden, previous)[0].numpy()
    expected = paper_block(draft, features[0].double().numpy(), anchor)
    ids = draft.token_ids(torch.arange(c.support_size)).numpy()
    np.testing.assert_allclose(hidden[0].numpy(), expected, atol=1e-4)
    np.testing.assert_allclose(base[0].numpy(), expected @ draft._lm_head.double().numpy()[ids].T, atol=1e-3)
    np.testing.assert_allclose(bias, paper_bias(draft, previous[0].tolist(), expected), atol=1e-4)
    w1 = draft.markov_head.markov_w1.weight.detach().double().numpy()[previous[0]]
    weight, b = (
        p.detach().double().numpy() for p in (draft.confidence_head.proj.weight[0], draft.confidence_head.proj.bias)
    )
    np.testing.assert_allclose(confidence, np.concatenate([expected, w1], -1) @ weight + b, atol=1e-3)


def test_many_blocks_of_one_sequence_equal_each_block_alone():
    draft = random_draft(2)
    features, tokens = torch.randn(2, 12, 2 * draft.config.hidden_size), torch.randint(0, 50, (2, 12))
    positions = torch.tensor([[1, 4, 11], [2, 3, 7]])
    with torch.no_grad():
        together = draft.blocks(draft.fuse(features), tokens.gather(1, positions), positions)
        for row in range(2):
            for i, a in enumerate(positions[row].tolist()):
                alone, _ = draft.draft_block(features[row : row + 1, :a], tokens[row, a][None])
                torch.testing.assert_close(together[row, i], alone[0], atol=1e-4, rtol=1e-4)


def test_a_block_at_position_zero_sees_itself_and_is_finite():
    draft = random_draft(3)
    with torch.no_grad():
        hidden = draft.blocks(draft.fuse(torch.randn(1, 5, 64)), torch.tensor([[4]]), torch.tensor([[0]]))
    assert torch.isfinite(hidden).all()


def test_padded_features_are_cut_off_by_the_lengths():
    draft = random_draft(4)
    features = torch.randn(2, 9, 64)
    with torch.no_grad():
        hidden, _ = draft.draft_block(features, torch.tensor([1, 2]), torch.tensor([9, 5]))
        short, _ = draft.draft_block(features[1:, :5], torch.tensor([2]))
    torch.testing.assert_close(hidden[1], short[0], atol=1e-4, rtol=1e-4)


def test_a_saved_draft_loads_and_a_wrong_one_is_named(tmp_path):
    import json

    draft = random_draft(5)
    (tmp_path / "config.json").write_text(json.dumps(draft.raw))
    state = {k: v.contiguous() for k, v in draft.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    loaded = load_draft(tmp_path, draft.embedding, draft._lm_head)
    features = torch.randn(1, 6, 64)
    with torch.no_grad():
        torch.testing.assert_close(
            loaded.draft_block(features, torch.tensor([1])), draft.draft_block(features, torch.tensor([1]))
        )
    save_file({k: v for k, v in state.items() if k != "fc.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="fc.weight"):
        load_draft(tmp_path, draft.embedding, draft._lm_head)
