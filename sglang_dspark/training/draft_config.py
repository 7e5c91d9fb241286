"""What a DSpark checkpoint's config.json says, read and checked (DeepSpec's format and our additions, design.md §4)."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path

ARCHITECTURES = {"Qwen3DSparkModel": True, "LlamaDSparkModel": False}  # name -> has q/k norms
HEADS = ("vanilla", "gated", "rnn")
# Keys of every transformers config that say nothing about a draft.
TRANSFORMERS_NOISE = [
    "_name_or_path",
    "transformers_version",
    "quantization_config",
    "auto_map",
    "output_hidden_states",
    "output_attentions",
    "return_dict",
    "id2label",
    "label2id",
    "problem_type",
    "chunk_size_feed_forward",
    "is_encoder_decoder",
    "use_cache",
]


@dataclass(frozen=True)
class DraftConfig:
    """Shapes and switches of a draft. ``feature_layers`` are OUTPUTS of the target's decoder layers (0-based).

    ``raw`` is the whole config.json (the target's settings with the draft's over them); RoPE is read from it.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    gamma: int
    mask_token_id: int
    feature_layers: tuple[int, ...]
    rank: int
    head_type: str
    confidence: bool
    confidence_with_markov: bool
    hidden_confidence: bool
    normalize_features: bool
    raw: dict

    def __post_init__(self) -> None:
        problems = []
        if self.architecture not in ARCHITECTURES:
            problems.append(f"architectures {self.architecture!r} is not one of {', '.join(ARCHITECTURES)}")
        if self.gamma < 1:
            problems.append(f"block_size {self.gamma} is below 1")
        if not 0 <= self.mask_token_id < self.vocab_size:
            problems.append(f"mask_token_id {self.mask_token_id} is outside the vocabulary 0..{self.vocab_size - 1}")
        if not self.feature_layers:
            problems.append("target_layer_ids is empty: name at least one target layer")
        if self.rank < 0 or (self.rank and self.head_type not in HEADS):
            problems.append(
                f"markov_rank {self.rank} with markov_head_type {self.head_type!r}: one of {', '.join(HEADS)}"
            )
        if self.confidence and self.confidence_with_markov and self.rank == 0:
            problems.append("confidence_head_with_markov needs markov_rank above 0")
        if self.heads % self.kv_heads or not 0 < self.draft_vocab_size <= self.vocab_size:
            problems.append(
                f"{self.heads} heads over {self.kv_heads} kv heads, draft_vocab_size {self.draft_vocab_size}"
            )
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def qk_norm(self) -> bool:
        return ARCHITECTURES[self.architecture]

    @property
    def restricted(self) -> bool:
        """Whether the draft proposes from ``draft_token_ids`` only."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def confidence_input_size(self) -> int:
        return self.hidden_size + (self.rank if self.confidence_with_markov else 0)

    @classmethod
    def from_dict(cls, raw: dict) -> DraftConfig:
        """Read flat keys, or keys nested under ``dspark_config`` / ``dflash_config``. Missing keys raise ValueError."""
        flat = {**raw, **raw.get("dflash_config", {}), **raw.get("dspark_config", {})}
        try:
            rank = flat.get("markov_rank", 0)
            return cls(
                architecture=flat["architectures"][0],
                hidden_size=flat["hidden_size"],
                intermediate_size=flat["intermediate_size"],
                layers=flat["num_hidden_layers"],
                heads=flat["num_attention_heads"],
                kv_heads=flat["num_key_value_heads"],
                head_dim=flat.get("head_dim") or flat["hidden_size"] // flat["num_attention_heads"],
                vocab_size=flat["vocab_size"],
                draft_vocab_size=flat.get("draft_vocab_size") or flat["vocab_size"],
                rms_norm_eps=flat["rms_norm_eps"],
                gamma=flat["block_size"],
                mask_token_id=flat["mask_token_id"],
                feature_layers=tuple(flat["target_layer_ids"]),
                rank=rank,
                head_type=flat.get("markov_head_type", "vanilla") if rank else "none",
                confidence=flat.get("enable_confidence_head", False),
                confidence_with_markov=flat.get("confidence_head_with_markov", False),
                hidden_confidence=flat.get("enable_hidden_confidence_head", False),
                normalize_features=flat.get("normalize_features", False),
                raw=flat,
            )
        except KeyError as error:
            raise ValueError(f"the draft's config.json lacks the key {error}") from error

    @classmethod
    def load(cls, folder: str | Path) -> DraftConfig:
        """Read ``folder/config.json``."""
        return cls.from_dict(json.loads((Path(folder) / "config.json").read_text()))


def make_config(target: dict, **draft) -> dict:
    """config.json of a new draft: a copy of the target's settings with the draft's keys over them (flat, DeepSpec's
    way).
    """
    raw = copy.deepcopy(target)
    for key in TRANSFORMERS_NOISE:
        raw.pop(key, None)
    raw["num_target_layers"] = raw["num_hidden_layers"]
    raw.update(tie_word_embeddings=False, **draft)
    raw["layer_types"] = ["full_attention"] * raw["num_hidden_layers"]
    return raw
