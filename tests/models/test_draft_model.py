"""The draft as the engine runs it against an independent forward in plain torch (sglang_dspark.training.model).

Bug class: a wrong RoPE position, a missing norm, K and V of the context taken from another projection, a causal mask in
the block, the anchor's own feature in the context, head rows or token ids permuted. Everything is random and in
float32, so any of them moves the states by far more than the tolerance of 1e-4.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from sglang_dspark.models.checkpoint import read_draft_config
from sglang_dspark.training.model import load_draft
from tests.engine.tiny import tiny_target
from tests.engine.tiny_draft import tiny_draft
from tests.models.draft_block import CONTEXTS, block_states, engine_draft

VARIANTS = {
    "qwen-vanilla": {},
    "qwen-gated": {"markov_head_type": "gated", "markov_rank": 24},
    "qwen-rnn": {"markov_head_type": "rnn", "markov_rank": 16},
    "llama-restricted-normalised": {
        "architecture": "LlamaDSparkModel",
        "draft_vocab_size": 200,
        "normalize_features": True,
        "enable_hidden_confidence_head": True,
    },
    "dflash": {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
    "one-layer-nested": {"num_hidden_layers": 1, "nested": True, "confidence_head_with_markov": False},
}


@pytest.fixture(scope="module")
def engine():
    """The engine's model layers in this process: one rank, no server."""
    from tests.engine.in_process import single_rank

    with single_rank():
        yield


@pytest.mark.parametrize("name", VARIANTS)
def test_the_engines_block_states_and_heads_are_those_of_the_plain_forward(engine, tmp_path, name):
    target = tiny_target(tmp_path / "target")
    folder = tiny_draft(tmp_path / "draft", target, **VARIANTS[name])
    if name == "qwen-gated":
        folder = tiny_draft(tmp_path / "draft2", target, seed=3, **VARIANTS[name])
    own = load_file(target / "model.safetensors")
    embedding, head = own["model.embed_tokens.weight"].float(), own["lm_head.weight"].float()
    golden = _golden(folder, embedding, head)
    draft = read_draft_config(folder)
    width = draft.hidden_size * len(draft.target_layer_ids)
    features = [torch.randn(n, width) * 3 for n in CONTEXTS]
    anchors = torch.tensor([9, 100, 31])

    model, states = _engine_states(folder, target, embedding, head, features, anchors)
    previous = torch.tensor([17, 4, 250])
    for r, feature in enumerate(features):
        expected, base = golden.draft_block(feature[None], anchors[r : r + 1])
        assert torch.allclose(states[r], expected[0], atol=1e-4), name
        assert torch.allclose(model.base_logits(states[r]), base[0], atol=1e-4)
    if draft.markov_rank:
        ours, _ = model.markov_head.bias(previous, states[:, 0], None)
        theirs, _ = golden.markov_head.bias(previous, states[:, 0], None)
        assert torch.allclose(ours, theirs, atol=1e-4)
    if draft.enable_confidence_head:
        embedded = model.markov_head.markov_w1(previous)[:, None] if draft.confidence_head_with_markov else None
        ours = model.confidence_head(states[:, :1], embedded)
        assert torch.allclose(ours[:, 0], golden.confidence_logits(states[:, 0], previous).float(), atol=1e-4)


def test_every_draft_model_is_captured_from_ids():
    """For a `forward` with `input_embeds` the engine captures a graph over a buffer that no step fills: every block is
    then drafted from stale memory, and nobody is told."""
    import inspect
    import pkgutil

    from sglang_dspark import models

    modules = [module for _, module, _ in pkgutil.iter_modules(models.__path__, models.__name__ + ".")]
    classes = [kind for name in modules for kind in getattr(importlib.import_module(name), "EntryClass", ())]
    assert len(classes) >= 2
    for kind in classes:
        assert "input_embeds" not in inspect.signature(kind.forward).parameters and hasattr(kind, "forward_embed"), kind


def test_an_engine_draft_that_loses_its_context_is_told_apart(engine, tmp_path):
    """The tolerance has teeth: without the context's keys the states differ by more than 100 times as much."""
    target = tiny_target(tmp_path / "target")
    folder = tiny_draft(tmp_path / "draft", target)
    own = load_file(target / "model.safetensors")
    embedding, head = own["model.embed_tokens.weight"].float(), own["lm_head.weight"].float()
    features = [torch.randn(n, 128) for n in CONTEXTS]
    _, right = _engine_states(folder, target, embedding, head, features, torch.tensor([9, 100, 31]))
    _, wrong = _engine_states(
        folder, target, embedding, head, [f.flip(0) for f in features], torch.tensor([9, 100, 31])
    )
    assert (right - wrong)[1:].abs().max() > 1e-2


def _golden(folder, embedding, head):
    import json

    config = json.loads((folder / "config.json").read_text())
    if "dspark_config" in config:  # the plain forward reads flat keys
        config |= config.pop("dspark_config")
        (folder / "config.json").write_text(json.dumps(config))
    return load_draft(folder, embedding, head)


def _engine_states(folder, target, embedding, head, features, anchors):
    """The draft and its states [R, gamma, d] through the engine's layers, its KV pool and our attention backend."""
    model = engine_draft(folder, torch.nn.Embedding.from_pretrained(embedding), SimpleNamespace(weight=head))
    return model, block_states(model, features, anchors)
