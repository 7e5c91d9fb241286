"""The keys of a draft's config.json that are the engine's and not ours: its dtype, its family, its positions.

The engine reads them when it builds the draft, half a minute after the start, and some only when the first request runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sglang_dspark.errors import first_fault, wrong_value
from sglang_dspark.models.draft_config import DraftCheckpointError

DTYPES = ("bfloat16", "float16", "half", "float32", "float")
# What the engine's rotary embedding knows.
ROPE_TYPES = (
    "default", "linear", "dynamic", "yarn", "deepseek_yarn", "longrope", "llama3", "proportional", "mrope",
)  # fmt: skip
MAX_POSITIONS = 1 << 24  # the engine keeps a table with a row per position; the longest published context is 10 million

_Positive = Annotated[float, Field(gt=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")


class _Rope(_Strict):
    rope_type: Literal[ROPE_TYPES] | None = None
    type: Literal[ROPE_TYPES] | None = None
    rope_theta: _Positive | None = None
    factor: _Positive | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None


class EngineKeys(_Strict):
    """What the engine needs of a draft's config, whatever else stands in it."""

    model_type: str
    dtype: Literal[DTYPES] | None = None
    torch_dtype: Literal[DTYPES] | None = None
    max_position_embeddings: Annotated[int, Field(ge=1, le=MAX_POSITIONS)] | None = None
    rope_theta: _Positive | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None


def check_engine_keys(config: Mapping) -> None:
    """Check the engine's keys of a config that `DraftConfig.from_dict` has accepted, the last step as the engine does.

    Raises:
        DraftCheckpointError: a key has a type or a value that the engine could not use; `model_type` is unknown.
    """
    try:
        keys = EngineKeys.model_validate(dict(config))
        for rope in (keys.rope_parameters, keys.rope_scaling):
            for part in (rope, *(rope or {}).values()):  # one for all layers, or one for each kind of layer
                if isinstance(part, Mapping):
                    _Rope.model_validate(dict(part))
    except ValidationError as error:
        raise DraftCheckpointError(f"draft config: {first_fault(error)}") from None
    _check_family(keys.model_type, config)


def _check_family(model_type: str, config: Mapping) -> None:
    """Build the configuration object of `model_type`, whose own checks see the keys that nobody named above."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        import sglang.srt.utils.hf_transformers_utils  # noqa: F401  (registers the engine's own families)
    if model_type not in CONFIG_MAPPING:
        raise DraftCheckpointError(
            "draft config: " + wrong_value("model_type", model_type, "a family that transformers knows: the target's")
        )
    try:
        CONFIG_MAPPING[model_type].from_dict(dict(config))
    except Exception as error:  # a validator, an attribute or an index: transformers has no common base for them
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DraftCheckpointError(f"draft config: transformers cannot read it as {model_type} ({reason})") from error
