"""Small random drafts and targets for the tests of this folder."""

from __future__ import annotations

import torch

from sglang_dspark.training.model import TrainableDraft

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "block_size": 4,
    "mask_token_id": 3,
    "target_layer_ids": [0, 2],
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def random_draft(seed: int = 0, architecture: str = "Qwen3DSparkModel", **changes) -> TrainableDraft:
    """A float32 draft with every parameter random, norms included (a norm at 1 would hide a forgotten one)."""
    torch.manual_seed(seed)
    raw = {"architectures": [architecture], **SIZES, **changes}
    shape = raw["vocab_size"], raw["hidden_size"]
    draft = TrainableDraft(raw, torch.randn(shape), torch.randn(shape))
    config = draft.config
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    if config.restricted:
        draft.draft_token_ids.copy_(torch.randperm(config.vocab_size)[: config.support_size])
    return draft.eval()
