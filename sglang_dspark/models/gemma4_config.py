"""The config of a Gemma 4 draft as the engine can read it.

A published draft's config.json is the target's text config, which says `head_dim` twice: of sliding layers, and under
`global_head_dim` of full ones. transformers keeps the two apart and raises where a single one is asked for, so SGLang's
parser fails on a text config that stands alone. A draft has full layers only: here their shape is the only one.
"""

from __future__ import annotations

from transformers import PretrainedConfig

from sglang_dspark.contract.hooks import AROUND, Hook
from sglang_dspark.models.draft_config import gemma4_keys
from sglang_dspark.models.families import GEMMA4_ARCHITECTURES, architecture_of


class Gemma4DSparkConfig(PretrainedConfig):
    """Flat, one shape and one rotation for all layers."""

    model_type = "gemma4_dspark"


def _parse(original, parser, model, *args, **kwargs):
    config = _draft_config(model, kwargs.get("revision"))
    return original(parser, model, *args, **kwargs) if config is None else config


def _draft_config(model, revision: str | None) -> Gemma4DSparkConfig | None:
    try:
        raw, _ = PretrainedConfig.get_config_dict(model, revision=revision)
    except (OSError, ValueError):
        return None  # the engine says it better
    if architecture_of(raw) not in GEMMA4_ARCHITECTURES:
        return None
    flat = gemma4_keys(raw)
    rope = flat.get("rope_parameters") or {}
    flat["rope_parameters"] = rope.get("full_attention", rope)
    for key in ("model_type", "sliding_window"):
        flat.pop(key, None)
    config = Gemma4DSparkConfig(**flat)
    config.name_or_path = str(model)
    return config


HOOKS = (
    Hook(
        "sglang.srt.utils.hf_transformers.config:HfModelConfigParser.parse",
        AROUND,
        _parse,
        ("model", "trust_remote_code", "revision", "kwargs"),
    ),
)
