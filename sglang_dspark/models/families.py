"""Draft families: the architectures that are served, and one sentence for each kind of checkpoint that is not.

A draft's config says more than its tensors do: a bias, a window or another activation that we left out would draft
wrongly without a word. Whatever changes the block and is not built here is refused by its key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

# One block (per-head norms of queries and keys) under the names that different exporters give it.
QK_NORM_ARCHITECTURES = ("Qwen3DSparkModel", "LingDSparkModel", "Lfm2DSparkDraftModel", "DSparkDraftModel")
PLAIN_ARCHITECTURES = ("LlamaDSparkModel",)
GEMMA4_ARCHITECTURES = ("Gemma4DSparkModel",)
ARCHITECTURES = QK_NORM_ARCHITECTURES + PLAIN_ARCHITECTURES + GEMMA4_ARCHITECTURES
# What the plain-torch forward of training builds; the others are drafted with, not trained or measured offline.
TRAINED_ARCHITECTURES = ("Qwen3DSparkModel", "LlamaDSparkModel", "LingDSparkModel")

BUILT_IN = "SGLang's own DSPARK (--speculative-algorithm DSPARK)"
_BUNDLED_KEYS = ("dspark_block_size", "dspark_markov_rank", "dspark_noise_token_id", "dspark_target_layer_ids")
_REFUSED_ARCHITECTURES = {
    "DSparkMiniMaxDraftModel": f"a MiniMax draft is made of its target's own layers: use {BUILT_IN}",
}

Rule = tuple[str, Callable[[object], bool], str]
_BLOCK_RULES: tuple[Rule, ...] = (
    ("attention_bias", bool, "false: projections have no bias here"),
    ("sample_from_anchor", lambda v: v is False, "true: every slot drafts the token after it"),
    ("is_causal", bool, "false: a block sees all of itself"),
    ("projector_type", lambda v: v not in (None, "dspark"), "dspark or absent"),
    ("conv_kernel_size", bool, "absent: blocks have no convolutions here"),
    ("attention_sink_bias", bool, "absent: attention has no sinks here"),
    ("attention_value_scale", lambda v: v not in (None, 1), "absent: values are not scaled here"),
    (
        "layer_types",
        lambda v: isinstance(v, list) and "sliding_attention" in v,
        "full_attention: drafts see their whole context here",
    ),
)
_QWEN_RULES: tuple[Rule, ...] = (
    ("hidden_act", lambda v: v not in (None, "silu"), "silu"),
    ("mlp_bias", bool, "false: projections have no bias here"),
    ("use_gemma_norm", bool, "false: gains are plain here"),
    ("partial_rotary_factor", lambda v: v not in (None, 1), "1: the whole head is rotated here"),
    ("final_logit_softcapping", lambda v: v is not None, "absent: only Gemma 4 drafts cap their logits"),
)
_GEMMA4_RULES: tuple[Rule, ...] = (
    ("hidden_activation", lambda v: v != "gelu_pytorch_tanh", "gelu_pytorch_tanh"),
    ("enable_moe_block", bool, "false: a draft has no experts"),
    ("hidden_size_per_layer_input", bool, "0: a draft has no per-layer inputs"),
    ("use_double_wide_mlp", bool, "false"),
)


def architecture_of(config: Mapping) -> str:
    """The first of `architectures`; "(none)" where there is none."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else "(none)"


def why_refused(config: Mapping) -> str | None:
    """Why a draft with this config cannot be served, in one sentence; None where nothing speaks against it.

    Args:
        config: a draft's `config.json` with its nested keys moved to the top.
    """
    architecture = architecture_of(config)
    if architecture in _REFUSED_ARCHITECTURES:
        return _REFUSED_ARCHITECTURES[architecture]
    if architecture.startswith("DeepseekV4") or any(config.get(key) is not None for key in _BUNDLED_KEYS):
        return f"this checkpoint carries its draft inside the target (mtp.*), which only {BUILT_IN} can run"
    if config.get("quantization_config"):
        return f"quantised draft weights are not supported: use bf16, fp16 or fp32 weights, or {BUILT_IN}"
    rules = _BLOCK_RULES + (_GEMMA4_RULES if architecture in GEMMA4_ARCHITECTURES else _QWEN_RULES)
    for key, applies, right in rules:
        if applies(config.get(key)):
            return f"{key}={config.get(key)!r}; this kind of draft is not built here, it must be {right} (or use {BUILT_IN})"
    return _why_rope_refused(config, architecture)


def _why_rope_refused(config: Mapping, architecture: str) -> str | None:
    rope = _mapping(config.get("rope_parameters") or config.get("rope_scaling"))
    if architecture in GEMMA4_ARCHITECTURES:
        kind = _mapping(rope.get("full_attention", rope)).get("rope_type")
        if kind not in ("proportional", "default"):
            return f"rope_parameters of full_attention have rope_type={kind!r}; it must be proportional or default"
        return None
    for key, whole in (("partial_rotary_factor", 1), ("rope_dim", config.get("head_dim"))):
        if rope.get(key) not in (None, whole):
            return f"{key}={rope[key]!r} in the RoPE parameters; the whole head is rotated here (or use {BUILT_IN})"
    return None


def _mapping(value: object) -> Mapping:
    return value if isinstance(value, Mapping) else {}


def refuse_recurrent_target(model_config) -> None:
    """Refuse a target (SGLang's `ModelConfig`) whose layers keep a recurrent state.

    Rejected drafts leave keys and values that the next step overwrites; a state would keep them for good.

    Raises:
        ValueError: naming the architecture and what serves it.
    """
    from sglang.srt.configs.hybrid_arch import mambaish_config

    if mambaish_config(model_config) is not None:
        raise ValueError(
            f"{model_config.hf_config.architectures[0]} keeps a recurrent or convolution state, which this worker does "
            f"not roll back after a rejected draft: use {BUILT_IN}, or --verify-mode off"
        )
