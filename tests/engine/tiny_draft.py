"""Tiny DSpark drafts in DeepSpec's format for the tiny targets: random, or agreeing with the target about half the time."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sglang_dspark.models.draft_config import DraftConfig
from tests.engine.tiny import MASK_ID

DEFAULTS = {
    "block_size": 4,
    "num_hidden_layers": 2,
    "target_layer_ids": [0, 2],
    "mask_token_id": MASK_ID,
    "markov_rank": 64,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "tie_word_embeddings": False,
}


def tiny_draft(
    directory: str | Path,
    target: str | Path,
    *,
    seed: int = 0,
    agreeing: bool = False,
    architecture: str = "Qwen3DSparkModel",
    nested: bool = False,
    **changes,
) -> Path:
    """Write a tiny draft for `target` and return its folder.

    Args:
        agreeing: give the vanilla head the target's own embedding and lm_head, so that its first guess is what the
            target would say without its layers; use it with `soften_layers`, or it agrees by chance only.
        nested: put the DSpark keys under `dspark_config`.
        changes: config keys that differ from `DEFAULTS`.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = json.loads((Path(target) / "config.json").read_text())
    config |= {"architectures": [architecture], "num_target_layers": config["num_hidden_layers"], **DEFAULTS, **changes}
    config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    draft = DraftConfig.from_dict(config)
    tensors = random_tensors(draft, seed)
    if draft.draft_vocab_size:
        tensors["draft_token_ids"] = torch.arange(0, draft.vocab_size)[-draft.draft_vocab_size :].clone()
    if agreeing:
        _agree(tensors, draft, Path(target))
    save_file(tensors, directory / "model.safetensors")
    if nested:
        own = [k for k in config if k in DEFAULTS and k not in ("num_hidden_layers", "tie_word_embeddings")]
        config["dspark_config"] = {key: config.pop(key) for key in own}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def soften_layers(target: str | Path, factor: float = 0.25) -> Path:
    """Scale down what a tiny target's layers add to its residual, so that the last token decides most of the next."""
    path = Path(target) / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= factor
    save_file(tensors, path, metadata={"format": "pt"})
    return Path(target)


def random_tensors(draft: DraftConfig, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in draft.expected_tensors().items():
        if "norm.weight" in name or "layernorm.weight" in name:
            tensors[name] = 1 + 0.1 * torch.randn(shape, generator=generator)
        else:
            tensors[name] = torch.randn(shape, generator=generator) / max(shape[-1], 1) ** 0.5
    return tensors


def _agree(tensors: dict[str, torch.Tensor], draft: DraftConfig, target: Path) -> None:
    """Markov bias = lm_head · RMSNorm(embedding of the last token); the backbone only whispers."""
    own = load_file(target / "model.safetensors")
    embedding = own["model.embed_tokens.weight"].float()
    head = own.get("lm_head.weight", own["model.embed_tokens.weight"]).float()
    normed = embedding * torch.rsqrt(embedding.pow(2).mean(-1, keepdim=True) + draft.rms_norm_eps)
    tensors["markov_head.markov_w1.weight"] = (normed * own["model.norm.weight"].float()).contiguous()
    rows = head if not draft.draft_vocab_size else head[tensors["draft_token_ids"]]
    tensors["markov_head.markov_w2.weight"] = rows.clone().contiguous()
    tensors["norm.weight"] *= 0.05
