"""A draft checkpoint in its folder: found, its config read, its tensors compared with what the config promises.

Only headers are read here, never weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from sglang_dspark.models.draft_config import DraftCheckpointError, DraftConfig

# A draft may bring the target's own embedding and head (published ones do); they are shared, not loaded.
SHARED_WITH_TARGET = ("embed_tokens.weight", "lm_head.weight")
# Published V4 drafts have a confidence head without bias.
OPTIONAL_TENSORS = ("confidence_head.proj.bias", "hidden_confidence_head.proj.bias")


def tensor_name(name: str) -> str:
    """The DeepSpec name of a stored tensor (some exporters add a `model.` prefix)."""
    return name.removeprefix("model.")


def check_tensors(config: DraftConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    """Compare a checkpoint's tensor names and shapes with what its config promises.

    Raises:
        DraftCheckpointError: a tensor is missing, unknown, or has another shape.
    """
    expected = config.expected_tensors()
    found = {tensor_name(name): tuple(shape) for name, shape in found.items()}
    missing = sorted(set(expected) - set(found) - set(OPTIONAL_TENSORS))
    unknown = sorted(set(found) - set(expected) - set(SHARED_WITH_TARGET))
    if missing:
        raise DraftCheckpointError(f"draft checkpoint lacks the tensors {missing}, which its config.json promises")
    if unknown:
        raise DraftCheckpointError(
            f"draft checkpoint has the tensors {unknown}, which its config.json does not explain"
        )
    for name, shape in expected.items():
        if name in found and found[name] != shape:
            raise DraftCheckpointError(
                f"draft tensor {name} has shape {list(found[name])}; {list(shape)} would be right"
            )


def read_draft_config(path: str | Path) -> DraftConfig:
    """The checked config of the draft checkpoint in folder `path`.

    Raises:
        DraftCheckpointError: no readable config.json, or one that cannot be right.
    """
    file = Path(path) / "config.json"
    try:
        return DraftConfig.from_dict(json.loads(file.read_text()))
    except (OSError, json.JSONDecodeError) as error:
        raise DraftCheckpointError(f"no readable draft config at {file}: {error}") from error


def check_draft_folder(path: str | Path) -> DraftConfig:
    """Read config and safetensors headers (not the weights) of a draft folder and check both.

    Raises:
        DraftCheckpointError: see `read_draft_config` and `check_tensors`; also a folder without safetensors.
    """
    from safetensors import SafetensorError, safe_open

    config = read_draft_config(path)
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise DraftCheckpointError(f"no *.safetensors in the draft folder {path}")
    shapes = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as tensors:
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise DraftCheckpointError(f"cannot read {file}: {error}") from error
    check_tensors(config, shapes)
    return config


def local_folder(path: str) -> str:
    """A draft's local folder: `path` itself, or a Hugging Face repository downloaded to the cache."""
    if os.path.isdir(path):
        return path
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(path, allow_patterns=["*.json", "*.safetensors"])
    except Exception as error:
        raise ValueError(
            f"--speculative-draft-model-path {path}: no such folder, and no such repository ({error})"
        ) from error
