"""Write a trained draft as a DeepSpec-format folder: config.json, safetensors, a link to the target's tokenizer."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from sglang_dspark.training.model import TrainableDraft


def export_draft(draft: TrainableDraft, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Save atomically into ``folder`` (replacing its config and weights only). The shared embedding and lm_head are not
    stored. ``draft_token_ids`` is int32.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = {}
    for name, tensor in draft.state_dict().items():
        kind = torch.int32 if name == "draft_token_ids" else dtype
        state[name] = tensor.detach().to("cpu", kind).contiguous()
    _replace(folder / "model.safetensors", lambda path: save_file(state, path, metadata={"format": "pt"}))
    _replace(folder / "config.json", lambda path: path.write_text(json.dumps(draft.raw, indent=2) + "\n"))
    return folder


def link_tokenizer(folder: Path, target: Path) -> None:
    """Make the target's tokenizer files reachable from ``folder``: symbolic links, or copies where links are
    refused.
    """
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        source, link = Path(target) / name, folder / name
        if not source.exists() or link.exists():
            continue
        try:
            link.symlink_to(source.resolve())
        except OSError:
            shutil.copy(source, link)


def _replace(path: Path, write) -> None:
    partial = path.with_name(path.name + ".partial")
    write(partial)
    os.chmod(partial, 0o644)
    os.replace(partial, path)
