"""The Gemma 4 draft as the engine runs it against the description of its forward in a few lines of plain torch.

Bug class: one of the norms or the layer's scalar left out, values taken without their norm or with a rotation, attention
scaled as usual, the whole head rotated instead of its quarter (published engines did that and lost a tenth of what is
accepted), embeddings scaled twice or never, the cap after the sequential head. Everything is random and in float32: each
of them moves the result by far more than the tolerance of 1e-4.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from sglang_dspark.models.checkpoint import check_draft_folder, read_draft_config
from sglang_dspark.models.draft_config import DraftCheckpointError
from tests.engine.tiny import MASK_ID, VOCAB_SIZE
from tests.engine.tiny_draft import random_tensors
from tests.models.draft_block import CONTEXTS, block_states, engine_draft

D, HEADS, HEAD_DIM = 64, 4, 512  # the published head size, with its one head of keys
CONFIG = {
    "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_unified_text", "vocab_size": VOCAB_SIZE,
    "hidden_size": D, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "num_key_value_heads": 2, "head_dim": 32, "global_head_dim": HEAD_DIM, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "attention_bias": False, "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
    "enable_moe_block": False, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "sliding_window": 512,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "final_logit_softcapping": 3.0,  # low, so that random logits reach it
    "layer_types": ["full_attention"] * 2, "num_target_layers": 4, "target_layer_ids": [0, 2], "block_size": 4,
    "mask_token_id": MASK_ID, "num_anchors": 512, "tie_word_embeddings": False, "markov_rank": 16,
    "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def engine():
    from tests.engine.in_process import single_rank

    with single_rank():
        yield


@pytest.fixture()
def folder(tmp_path):
    return gemma4_draft(tmp_path)


def gemma4_draft(folder, **changes):
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    tensors = random_tensors(read_draft_config(folder), seed=1)
    tensors |= {name: tensors[name].abs() + 0.3 for name in tensors if name.endswith("layer_scalar")}
    save_file(tensors, folder / "model.safetensors")
    return folder


def target_modules(scale=D**0.5):
    """An embedding as the engine's Gemma 4 has it, which scales by itself, and the head that is tied to it."""
    from sglang.srt.models.gemma4_causal import Gemma4TextScaledWordEmbedding

    embedding = Gemma4TextScaledWordEmbedding(VOCAB_SIZE, D, 0, embed_scale=scale)
    embedding.weight.data = torch.randn(VOCAB_SIZE, D, generator=torch.Generator().manual_seed(3)) / 8
    return embedding


# The reference: DeepSpec's forward, from its description (facts of the format: docs/compatibility.md).


def norm(x, gain=None):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 if gain is None else gain)


def rotated(x, positions):
    """Of 512 numbers the pairs (i, i + 256), i < 64, are turned by position * 1e6^(-2i/512)."""
    half, turned = HEAD_DIM // 2, HEAD_DIM // 8
    angles = torch.zeros(len(positions), half)
    angles[:, :turned] = positions[:, None].float() * 1e6 ** (-2 * torch.arange(turned) / HEAD_DIM)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def reference_states(t, embedding, feature, anchor):
    """States [gamma, d] of the block behind a context [n, m*d]; `t`: the checkpoint's tensors."""
    n, gamma = len(feature), CONFIG["block_size"]
    ids = torch.tensor([anchor] + [MASK_ID] * (gamma - 1))
    hidden, context = embedding[ids] * math.sqrt(D), norm(feature @ t["fc.weight"].T, t["hidden_norm.weight"])
    positions = torch.arange(n + gamma)
    for i in range(CONFIG["num_hidden_layers"]):
        w = {name.removeprefix(f"layers.{i}."): tensor for name, tensor in t.items() if name.startswith(f"layers.{i}.")}
        x = norm(hidden, w["input_layernorm.weight"])
        q = norm((x @ w["self_attn.q_proj.weight"].T).view(gamma, HEADS, HEAD_DIM), w["self_attn.q_norm.weight"])
        both = (torch.cat([context, x]) @ w["self_attn.k_proj.weight"].T).view(n + gamma, 1, HEAD_DIM)
        k, v = rotated(norm(both, w["self_attn.k_norm.weight"]), positions)[:, 0], norm(both)[:, 0]
        scores = torch.einsum("qhd,kd->hqk", rotated(q, positions[n:]), k)
        out = torch.einsum("hqk,kd->qhd", scores.softmax(-1), v).reshape(gamma, -1) @ w["self_attn.o_proj.weight"].T
        hidden = hidden + norm(out, w["post_attention_layernorm.weight"])
        x = norm(hidden, w["pre_feedforward_layernorm.weight"])
        gate, up = x @ w["mlp.gate_proj.weight"].T, x @ w["mlp.up_proj.weight"].T
        fed = (F.gelu(gate, approximate="tanh") * up) @ w["mlp.down_proj.weight"].T
        hidden = (hidden + norm(fed, w["post_feedforward_layernorm.weight"])) * w["layer_scalar"]
    return norm(hidden, t["norm.weight"])


def test_block_states_and_capped_logits_are_those_of_the_description(engine, folder):
    embedding = target_modules()
    model, tensors = engine_draft(folder, embedding, embedding), load_file(folder / "model.safetensors")
    torch.manual_seed(5)
    features, anchors = [torch.randn(n, 2 * D) * 3 for n in CONTEXTS], torch.tensor([9, 100, 31])
    states = block_states(model, features, anchors)
    for r, feature in enumerate(features):
        expected = reference_states(tensors, embedding.weight, feature, int(anchors[r]))
        assert torch.allclose(states[r], expected, atol=1e-4), (states[r] - expected).abs().max()
        base = 3 * torch.tanh(expected @ embedding.weight.T / 3)
        assert torch.allclose(model.base_logits(states[r]), base, atol=1e-4)
        assert base.abs().max() > 2, "no logit is near the cap: this test could not see it"
    previous = torch.tensor([17, 4, 250])
    bias, _ = model.markov_head.bias(previous, states[:, 0], None)
    w1, w2 = tensors["markov_head.markov_w1.weight"], tensors["markov_head.markov_w2.weight"]
    assert torch.allclose(bias, w1[previous] @ w2.T, atol=1e-4)
    seen = torch.cat([states[:, 0], w1[previous]], -1)
    logits = seen @ tensors["confidence_head.proj.weight"][0] + tensors["confidence_head.proj.bias"]
    ours = model.confidence_head(states[:, :1], model.markov_head.markov_w1(previous)[:, None])
    assert torch.allclose(ours[:, 0], logits, atol=1e-4)


def test_the_engines_model_runner_finds_loads_sizes_and_runs_it(tmp_path):
    """Registry, loader, cache and forward are the engine's own; only the target's embedding is a stand-in."""
    run = [sys.executable, "-W", "ignore", "-m", "tests.models.gemma4_runner", str(tmp_path)]
    done = subprocess.run(run, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    made, tensors = load_file(tmp_path / "states.safetensors"), load_file(tmp_path / "draft" / "model.safetensors")
    expected = reference_states(tensors, made["embedding"], made["features"], anchor=9)
    assert torch.allclose(made["states"], expected, atol=1e-4), (made["states"] - expected).abs().max()


@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma4_unified_text"])
def test_the_engine_sizes_the_drafts_cache_by_its_full_layers(engine, tmp_path, model_type):
    """The engine's own parser fails on these files; the target's sliding layers have another shape and a window."""
    from sglang.srt.configs.model_config import ModelConfig

    config = ModelConfig(str(gemma4_draft(tmp_path, model_type=model_type)), is_draft_model=True)
    assert (config.head_dim, config.v_head_dim, config.get_num_kv_heads(1)) == (HEAD_DIM, HEAD_DIM, 1)
    assert config.sliding_window_size is None and not config.is_hybrid_swa


def test_other_configs_still_go_to_the_engines_parser(engine, tmp_path):
    from sglang.srt.utils.hf_transformers_utils import get_config

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    assert type(get_config(str(tmp_path), trust_remote_code=False)).__name__ == "Qwen3Config"


def test_values_have_a_projection_of_their_own_where_the_config_says_so(engine, tmp_path):
    folder = gemma4_draft(tmp_path, attention_k_eq_v=False, num_key_value_heads=2)
    assert read_draft_config(folder).expected_tensors()["layers.0.self_attn.v_proj.weight"] == (2 * HEAD_DIM, D)
    model = engine_draft(folder, target_modules(), target_modules())
    k, v = model.layers[0].self_attn.qkv_proj.weight[HEADS * HEAD_DIM :].chunk(2)
    assert not torch.equal(k, v)


def test_a_target_that_does_not_scale_its_embedding_is_refused(engine, folder):
    for embedding in (target_modules(scale=1.0), torch.nn.Embedding(VOCAB_SIZE, D)):
        with pytest.raises(DraftCheckpointError, match="needs a Gemma 4 target"):
            engine_draft(folder, embedding, SimpleNamespace(weight=embedding.weight.data))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"global_head_dim": None}, "global_head_dim is missing"),
        ({"num_global_key_value_heads": None}, "num_global_key_value_heads is missing"),
        ({"num_global_key_value_heads": 3}, "num_key_value_heads=3; it must be a divisor"),
        ({"hidden_activation": "silu"}, "hidden_activation='silu'"),
        ({"enable_moe_block": True}, "enable_moe_block=True"),
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input=256"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types="),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type='yarn'"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping=0.0; it must be"),
    ],
)
def test_a_key_that_this_draft_does_not_build_is_named(folder, changes, words):
    config = {k: v for k, v in (CONFIG | changes).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DraftCheckpointError) as error:
        check_draft_folder(folder)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("layers.1.layer_scalar"), "lacks the tensors ['layers.1.layer_scalar']"),
        (lambda t: t.update({"layers.0.self_attn.v_proj.weight": torch.zeros(1)}), "layers.0.self_attn.v_proj.weight"),
        (lambda t: t.update({"layers.0.self_attn.k_proj.weight": torch.zeros(32, D)}), "[32, 64]; [512, 64] would be"),
    ],
)
def test_a_missing_unknown_or_misshapen_tensor_is_named(folder, change, words):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(DraftCheckpointError) as error:
        check_draft_folder(folder)
    assert words in str(error.value)
