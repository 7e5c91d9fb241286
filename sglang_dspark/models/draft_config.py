"""What a DSpark draft checkpoint says about itself, checked before anything is loaded.

The format is DeepSpec's (`config.json` beside safetensors, keys flat or nested under
`dspark_config` / `dflash_config`), with three additions of ours, each absent in published drafts:
`draft_vocab_size` (the draft proposes from these tokens only), `normalize_features`, and
`enable_hidden_confidence_head` (a second confidence that reads no drafted token).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sglang_dspark.models.families import (
    ARCHITECTURES,
    GEMMA4_ARCHITECTURES,
    PLAIN_ARCHITECTURES,
    architecture_of,
    why_refused,
)

MARKOV_HEADS = ("vanilla", "gated", "rnn")
_NESTED_KEYS = ("dspark_config", "dflash_config")


class DraftCheckpointError(ValueError):
    """A draft checkpoint that cannot be served; the message names the key, its value and what would be right."""


@dataclass(frozen=True)
class DraftConfig:
    """The shape of one draft. Field names are the checkpoint's own keys."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    block_size: int  # gamma: drafted tokens per block
    target_layer_ids: tuple[int, ...]  # outputs of these target layers are the features
    mask_token_id: int
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    enable_hidden_confidence_head: bool = False
    draft_vocab_size: int | None = None
    normalize_features: bool = False
    attention_k_eq_v: bool = False  # values come from k_proj (Gemma 4)
    final_logit_softcapping: float | None = None  # of the base logits (Gemma 4)

    def __post_init__(self) -> None:
        _require(
            self.architecture in ARCHITECTURES,
            "architectures",
            [self.architecture],
            f"one of {', '.join(ARCHITECTURES)}",
        )
        for key in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "block_size",
        ):
            _require(getattr(self, key) >= 1, key, getattr(self, key), "at least 1")
        _require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads",
            self.num_key_value_heads,
            f"a divisor of num_attention_heads={self.num_attention_heads}",
        )
        _require(
            0 <= self.mask_token_id < self.vocab_size,
            "mask_token_id",
            self.mask_token_id,
            f"a token id below vocab_size={self.vocab_size}",
        )
        _require(len(self.target_layer_ids) >= 1, "target_layer_ids", list(self.target_layer_ids), "at least one layer")
        _require(self.markov_rank >= 0, "markov_rank", self.markov_rank, "0 (no sequential head) or more")
        _require(
            self.markov_head_type in MARKOV_HEADS,
            "markov_head_type",
            self.markov_head_type,
            f"one of {', '.join(MARKOV_HEADS)}",
        )
        _require(
            not self.confidence_head_with_markov or self.markov_rank > 0,
            "confidence_head_with_markov",
            True,
            "false, because markov_rank is 0 and there is no W1 to read",
        )
        cap = self.final_logit_softcapping
        _require(cap is None or cap > 0, "final_logit_softcapping", cap, "positive, or absent")
        if self.draft_vocab_size is not None:
            _require(
                1 <= self.draft_vocab_size <= self.vocab_size,
                "draft_vocab_size",
                self.draft_vocab_size,
                f"between 1 and vocab_size={self.vocab_size}",
            )

    @property
    def has_qk_norm(self) -> bool:
        return self.architecture not in PLAIN_ARCHITECTURES

    @property
    def is_gemma4(self) -> bool:
        return self.architecture in GEMMA4_ARCHITECTURES

    @property
    def has_hidden_confidence(self) -> bool:
        """Whether some confidence head reads the block's states alone."""
        return self.enable_hidden_confidence_head or (
            self.enable_confidence_head and not self.confidence_head_with_markov
        )

    @property
    def restricted(self) -> bool:
        """Whether the draft proposes from `draft_token_ids` only."""
        return self.draft_vocab_size is not None

    @property
    def support_size(self) -> int:
        """How many tokens the draft can propose."""
        return self.draft_vocab_size or self.vocab_size

    @classmethod
    def from_dict(cls, config: Mapping) -> DraftConfig:
        """Read a `config.json`, flat or nested.

        Raises:
            DraftCheckpointError: a key is missing or its value cannot be right.
        """
        flat = flatten_keys(config)
        reason = why_refused(flat)
        if reason is not None:
            raise DraftCheckpointError(f"draft config: {reason}")
        architecture = architecture_of(flat)
        if architecture in GEMMA4_ARCHITECTURES:
            flat = gemma4_keys(flat)
        heads = _integer(flat, "num_attention_heads")
        hidden = _integer(flat, "hidden_size")
        rank = int(flat.get("markov_rank") or 0)
        vocab = flat.get("draft_vocab_size")
        confident = bool(flat.get("enable_confidence_head", False))
        return cls(
            architecture=architecture,
            vocab_size=_integer(flat, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_integer(flat, "intermediate_size"),
            num_hidden_layers=_integer(flat, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=int(flat.get("num_key_value_heads") or heads),
            head_dim=int(flat.get("head_dim") or hidden // max(heads, 1)),
            rms_norm_eps=float(flat.get("rms_norm_eps", 1e-6)),
            block_size=_integer(flat, "block_size"),
            target_layer_ids=tuple(int(i) for i in _needed(flat, "target_layer_ids")),
            mask_token_id=_integer(flat, "mask_token_id"),
            markov_rank=rank,
            markov_head_type=str(flat.get("markov_head_type") or "vanilla").lower(),
            enable_confidence_head=confident,
            # Liquid's published drafts leave the key out and have the wide head.
            confidence_head_with_markov=bool(flat.get("confidence_head_with_markov", confident and rank > 0)),
            enable_hidden_confidence_head=bool(flat.get("enable_hidden_confidence_head", False)),
            draft_vocab_size=int(vocab) if vocab else None,
            normalize_features=bool(flat.get("normalize_features", False)),
            attention_k_eq_v=bool(flat.get("attention_k_eq_v", False)),
            final_logit_softcapping=flat.get("final_logit_softcapping"),
        )

    def check_target(self, *, hidden_size: int, vocab_size: int, num_hidden_layers: int) -> None:
        """Refuse a draft that was made for another target.

        Raises:
            DraftCheckpointError: widths, vocabulary or layer ids do not fit the target's.
        """
        _require(self.hidden_size == hidden_size, "hidden_size", self.hidden_size, f"the target's {hidden_size}")
        _require(self.vocab_size == vocab_size, "vocab_size", self.vocab_size, f"the target's {vocab_size}")
        for layer in self.target_layer_ids:
            # The engine hands out a layer's output when the next layer starts, so the last one never appears.
            _require(
                0 <= layer < num_hidden_layers - 1,
                "target_layer_ids",
                list(self.target_layer_ids),
                f"layers 0 to {num_hidden_layers - 2} (the target has {num_hidden_layers}; the output of its "
                "last layer is not available)",
            )

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the draft must bring, with its shape, under DeepSpec's names."""
        d, heads, kv, hd = self.hidden_size, self.num_attention_heads, self.num_key_value_heads, self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (d, d * len(self.target_layer_ids)),
            "hidden_norm.weight": (d,),
            "norm.weight": (d,),
        }
        for i in range(self.num_hidden_layers):
            layer = f"layers.{i}."
            shapes |= {
                layer + "input_layernorm.weight": (d,),
                layer + "post_attention_layernorm.weight": (d,),
                layer + "self_attn.q_proj.weight": (heads * hd, d),
                layer + "self_attn.k_proj.weight": (kv * hd, d),
                layer + "self_attn.v_proj.weight": (kv * hd, d),
                layer + "self_attn.o_proj.weight": (d, heads * hd),
                layer + "mlp.gate_proj.weight": (self.intermediate_size, d),
                layer + "mlp.up_proj.weight": (self.intermediate_size, d),
                layer + "mlp.down_proj.weight": (d, self.intermediate_size),
            }
            if self.attention_k_eq_v:
                del shapes[layer + "self_attn.v_proj.weight"]
            if self.is_gemma4:
                shapes |= {layer + f"{side}_feedforward_layernorm.weight": (d,) for side in ("pre", "post")}
                shapes[layer + "layer_scalar"] = (1,)
            if self.has_qk_norm:
                shapes |= {layer + "self_attn.q_norm.weight": (hd,), layer + "self_attn.k_norm.weight": (hd,)}
        return shapes | self._head_tensors()

    def _head_tensors(self) -> dict[str, tuple[int, ...]]:
        d, r = self.hidden_size, self.markov_rank
        shapes: dict[str, tuple[int, ...]] = {}
        if self.draft_vocab_size:
            shapes["draft_token_ids"] = (self.draft_vocab_size,)
        if r:
            shapes["markov_head.markov_w1.weight"] = (self.vocab_size, r)
            shapes["markov_head.markov_w2.weight"] = (self.support_size, r)
        if r and self.markov_head_type == "gated":
            shapes |= {"markov_head.gate_proj.weight": (r, d + r), "markov_head.gate_proj.bias": (r,)}
        if r and self.markov_head_type == "rnn":
            shapes |= {"markov_head.joint_proj.weight": (3 * r, 2 * r + d), "markov_head.joint_proj.bias": (3 * r,)}
        if self.enable_confidence_head:
            width = d + (r if self.confidence_head_with_markov else 0)
            shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
        if self.enable_hidden_confidence_head:
            shapes |= {"hidden_confidence_head.proj.weight": (1, d), "hidden_confidence_head.proj.bias": (1,)}
        return shapes


def flatten_keys(config: Mapping) -> dict:
    """Keys nested under `dspark_config` or `dflash_config` moved to the top, where they win."""
    flat = dict(config)
    for key in _NESTED_KEYS:
        nested = flat.get(key)
        if isinstance(nested, Mapping):
            flat |= nested
    return flat


def gemma4_keys(flat: Mapping) -> dict:
    """Gemma 4 states the heads of its full-attention layers, the only ones a draft has, under keys of their own."""
    same = flat.get("attention_k_eq_v", False)
    heads = _integer(flat, "num_global_key_value_heads" if same else "num_key_value_heads")
    return {**flat, "head_dim": _integer(flat, "global_head_dim"), "num_key_value_heads": heads}


def _require(right: bool, key: str, value: object, expected: str) -> None:
    if not right:
        raise DraftCheckpointError(f"draft config: {key}={value!r}; it must be {expected}")


def _needed(flat: Mapping, key: str) -> object:
    if flat.get(key) is None:
        raise DraftCheckpointError(f"draft config: {key} is missing")
    return flat[key]


def _integer(flat: Mapping, key: str) -> int:
    value = _needed(flat, key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise DraftCheckpointError(f"draft config: {key}={value!r}; it must be a whole number")
    return value
