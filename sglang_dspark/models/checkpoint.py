"""A draft checkpoint in its folder: found, its config read, its tensors compared with what the config promises.

`check_draft_folder` reads headers only; `check_draft_weights` reads the weights too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dspark.models.draft_config import DraftCheckpointError, DraftConfig
from sglang_dspark.models.engine_keys import check_engine_keys

if TYPE_CHECKING:
    import numpy as np
    import torch

# A draft may bring the target's own embedding and head (published ones do); they are shared, not loaded.
SHARED_WITH_TARGET = ("embed_tokens.weight", "lm_head.weight")
# Published V4 drafts have a confidence head without bias.
OPTIONAL_TENSORS = ("confidence_head.proj.bias", "hidden_confidence_head.proj.bias")

TOKEN_IDS = "draft_token_ids"
FLOATS = ("BF16", "F16", "F32", "F64")
INTEGERS = ("I64", "I32")


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
        DraftCheckpointError: no readable config.json, or one that cannot be right; the file is named.
    """
    return _read_config(Path(path) / "config.json", DraftConfig.from_dict)


def check_draft_folder(path: str | Path) -> DraftConfig:
    """Read config, safetensors headers and `draft_token_ids` (not the weights) of a draft folder and check them.

    Raises:
        DraftCheckpointError: see `read_draft_config`, `check_engine_keys`, `check_tensors` and `check_token_ids`; also
            a folder without safetensors, or a tensor that is not stored in floating point.
    """
    config = read_draft_config(path)
    _read_config(Path(path) / "config.json", check_engine_keys)
    shapes, ids = {}, None
    for file, tensors in _open_all(Path(path)):
        for stored in tensors.keys():  # noqa: SIM118  (not a mapping)
            part = tensors.get_slice(stored)
            shapes[stored] = tuple(part.get_shape())
            kinds = INTEGERS if tensor_name(stored) == TOKEN_IDS else FLOATS
            if part.get_dtype() not in kinds:
                raise DraftCheckpointError(
                    f"{file}: tensor {stored} is stored as {part.get_dtype()}; {' or '.join(kinds)} would be right"
                )
            if kinds is INTEGERS:
                ids = tensors.get_tensor(stored)
    check_tensors(config, shapes)
    if ids is not None:
        check_token_ids(ids, config.vocab_size, str(path))
    return config


def check_draft_weights(path: str | Path) -> None:
    """Read every weight of a draft folder once and refuse what is not finite.

    It costs one pass over the files, which the engine then finds in the page cache: 0.05 s for the demo draft's 33 MB.

    Raises:
        DraftCheckpointError: a weight is NaN or infinite.
    """
    for file, tensors in _open_all(Path(path), framework="pt"):
        for stored in tensors.keys():  # noqa: SIM118
            check_finite(f"{file}: tensor {stored}", tensors.get_tensor(stored))


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise DraftCheckpointError where a floating-point `tensor` holds a number that is NaN or infinite."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return
    lowest, highest = tensor.aminmax()  # NaN wins both; one pass without a mask as large as the tensor
    if not (lowest.isfinite() and highest.isfinite()):
        raise DraftCheckpointError(f"{name} holds numbers that are NaN or infinite: export the draft again")


def check_token_ids(ids: np.ndarray | torch.Tensor, vocab_size: int, source: str) -> None:
    """Check `draft_token_ids` [draft_vocab_size]: each a token id of the target, none twice.

    Raises:
        DraftCheckpointError: naming the first that is wrong.
    """
    seen: set[int] = set()
    for place, token in enumerate(ids.tolist()):
        if not 0 <= token < vocab_size:
            raise DraftCheckpointError(
                f"{source}: draft_token_ids[{place}]={token}; it must be a token id from 0 to {vocab_size - 1}"
            )
        if token in seen:
            raise DraftCheckpointError(f"{source}: draft_token_ids[{place}]={token} stands there twice; once is right")
        seen.add(token)


def _read_config(file: Path, read: Callable[[Mapping], Any]) -> Any:
    """`read` of the JSON in `file`; what it refuses names the file."""
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:  # unreadable, not UTF-8, not JSON, nested without end
        raise DraftCheckpointError(f"no readable draft config at {file}: {error}") from error
    try:
        return read(config)
    except DraftCheckpointError as error:
        raise DraftCheckpointError(f"{file}: {error}") from None


def _open_all(folder: Path, framework: str = "numpy") -> Iterator[tuple[Path, Any]]:
    """Each safetensors file of `folder`, opened.

    Raises:
        DraftCheckpointError: there is none, or one cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DraftCheckpointError(f"no *.safetensors in the draft folder {folder}")
    for file in files:
        try:
            opened = safe_open(file, framework=framework)
        except (SafetensorError, OSError) as error:
            raise DraftCheckpointError(f"cannot read {file}: {error}") from error
        with opened as tensors:
            yield file, tensors


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
