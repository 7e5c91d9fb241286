"""What a DSpark draft checkpoint says about itself, checked before anything is loaded.

The format is DeepSpec's (`config.json` beside safetensors, keys flat or nested under
`dspark_config` / `dflash_config`), with three additions of ours, each absent in published drafts:
`draft_vocab_size` (the draft proposes from these tokens only), `normalize_features`, and
`enable_hidden_confidence_head` (a second confidence that reads no drafted token).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, Strict, ValidationError
from pydantic.dataclasses import dataclass

from sglang_dspark.errors import UserError, first_fault, wrong_value
from sglang_dspark.models.families import ARCHITECTURES, GEMMA4_ARCHITECTURES, PLAIN_ARCHITECTURES, why_refused

MARKOV_HEADS = ("vanilla", "gated", "rnn")
MAX_BLOCK_SIZE = 64  # published drafts propose 5 to 16 tokens; every buffer of a step has this many columns
_NESTED_KEYS = ("dspark_config", "dflash_config")

# Far above any model, and small enough that the tensors' shapes can be listed before the checkpoint is compared.
Size = Annotated[int, Field(ge=1, le=1 << 24)]
Layers = Annotated[int, Field(ge=1, le=1024)]
# JSON has lists only, so a list may stand for the tuple; what is in it is checked as strictly as everything else.
LayerIds = Annotated[tuple[Annotated[int, Strict(), Field(ge=0)], ...], Strict(False)]


class DraftCheckpointError(UserError):
    """A draft checkpoint that cannot be served; the message names the key, its value and what would be right."""


@dataclass(frozen=True, config=ConfigDict(strict=True, allow_inf_nan=False))
class DraftConfig:
    """The shape of one draft. Field names are the checkpoint's own keys; each has the type that JSON must give it.

    Raises:
        pydantic.ValidationError: a value of another type or outside its bounds (`from_dict` says it in one line).
    """

    architecture: str
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    block_size: Annotated[int, Field(ge=1, le=MAX_BLOCK_SIZE)]  # gamma: drafted tokens per block
    target_layer_ids: LayerIds  # outputs of these target layers are the features
    mask_token_id: int
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    markov_rank: Annotated[int, Field(ge=0, le=1 << 24)] = 0  # 0: no sequential head
    markov_head_type: Literal[MARKOV_HEADS] = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    enable_hidden_confidence_head: bool = False
    draft_vocab_size: int | None = None
    normalize_features: bool = False
    attention_k_eq_v: bool = False  # values come from k_proj (Gemma 4)
    final_logit_softcapping: Annotated[float, Field(gt=0)] | None = None  # of the base logits (Gemma 4)

    def __post_init__(self) -> None:
        _require(
            self.architecture in ARCHITECTURES,
            "architectures",
            [self.architecture],
            f"one of {', '.join(ARCHITECTURES)}",
        )
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
        layers = list(self.target_layer_ids)
        _require(len(layers) >= 1, "target_layer_ids", layers, "at least one layer")
        # The engine hands out features in the order of the layers, each once.
        _require(layers == sorted(set(layers)), "target_layer_ids", layers, "ascending, each layer once")
        _require(
            not self.confidence_head_with_markov or self.markov_rank > 0,
            "confidence_head_with_markov",
            True,
            "false, because markov_rank is 0 and there is no W1 to read",
        )
        if self.draft_vocab_size is not None:
            _require(
                1 <= self.draft_vocab_size <= self.vocab_size,
                "draft_vocab_size",
                self.draft_vocab_size,
                f"between 1 and vocab_size={self.vocab_size}",
            )

    @property
    def has_qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head."""
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
        architecture = _architecture(flat.get("architectures"))
        if architecture in GEMMA4_ARCHITECTURES:
            flat = gemma4_keys(flat)
        given = {field.name: flat[field.name] for field in fields(cls) if flat.get(field.name) is not None}
        given["architecture"] = architecture
        if flat.get("markov_rank") and flat.get("enable_confidence_head"):
            # Liquid's published drafts leave the key out and have the wide head.
            given.setdefault("confidence_head_with_markov", True)
        given.setdefault("num_key_value_heads", given.get("num_attention_heads"))
        if "head_dim" not in given:
            given["head_dim"] = _quotient(given.get("hidden_size"), given.get("num_attention_heads"))
        if isinstance(given.get("markov_head_type"), str):
            given["markov_head_type"] = given["markov_head_type"].lower()
        try:
            return cls(**given)
        except ValidationError as error:
            raise DraftCheckpointError(f"draft config: {first_fault(error)}") from None

    def check_target(self, *, hidden_size: int, vocab_size: int, num_hidden_layers: int) -> None:
        """Refuse a draft that was made for another target.

        Raises:
            DraftCheckpointError: widths, vocabulary or layer ids do not fit the target's.
        """
        _refuse(self.hidden_size != hidden_size, "hidden_size", self.hidden_size, f"the target's {hidden_size}")
        _refuse(self.vocab_size != vocab_size, "vocab_size", self.vocab_size, f"the target's {vocab_size}")
        # The engine hands out a layer's output when the next layer starts, so the last one never appears.
        _refuse(
            self.target_layer_ids[-1] >= num_hidden_layers - 1,
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
    """Keys nested under `dspark_config` or `dflash_config` moved to the top, where they win.

    Raises:
        DraftCheckpointError: `config`, or what stands under one of the two keys, is no JSON object.
    """
    if not isinstance(config, Mapping):
        raise DraftCheckpointError(f"draft config: it must be a JSON object, not a {type(config).__name__}")
    flat = dict(config)
    for key in _NESTED_KEYS:
        nested = flat.get(key)
        if nested is None:
            continue
        if not isinstance(nested, Mapping):
            raise DraftCheckpointError("draft config: " + wrong_value(key, nested, "an object"))
        flat |= nested
    return flat


def gemma4_keys(flat: Mapping) -> dict:
    """Gemma 4 states the heads of its full-attention layers, the only ones a draft has, under keys of their own.

    Raises:
        DraftCheckpointError: one of them is missing.
    """
    heads = "num_global_key_value_heads" if flat.get("attention_k_eq_v") else "num_key_value_heads"
    for key in ("global_head_dim", heads):
        if flat.get(key) is None:
            raise DraftCheckpointError(f"draft config: {key} is missing")
    return {**flat, "head_dim": flat["global_head_dim"], "num_key_value_heads": flat[heads]}


def _require(right: bool, key: str, value: object, expected: str) -> None:
    """A check of `DraftConfig`, whose ValueError pydantic carries to `from_dict`; elsewhere `_refuse` is used."""
    if not right:
        raise ValueError(wrong_value(key, value, expected))


def _refuse(wrong: bool, key: str, value: object, expected: str) -> None:
    if wrong:
        raise DraftCheckpointError("draft config: " + wrong_value(key, value, expected))


def _architecture(value: Any) -> str:
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise DraftCheckpointError(
            "draft config: " + wrong_value("architectures", value, f"a list with one of {', '.join(ARCHITECTURES)}")
        )
    return value[0]


def _quotient(size: Any, heads: Any) -> int:
    """`size // heads`; 1 where either is no such number, which is then found under its own key."""
    sound = type(size) is int and type(heads) is int and heads > 0
    return size // heads if sound else 1
