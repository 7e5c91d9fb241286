"""Sequences with their target features on disk: one safetensors file per shard, written aside and renamed.

A shard holds ``tokens`` [N] int32, ``lengths``, ``prompt_lengths``, ``prompt_index`` [s] int64, ``kind`` [s] uint8 (the
prompt's class), ``log_totals`` [N] float32, ``features`` [N, m, d] and ``final`` [N, d] bfloat16. Row i of the
features belongs to token i; the last
token of a sequence was never fed to the target, so its row is zero and is never used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file


@dataclass
class Example:
    """One sequence. ``tokens`` [n] int32, ``features`` [n, m, d], ``final`` [n, d]; answers start at ``prompt_length``.

    ``log_totals`` [n] float32: log Σ exp of the target's logits over its whole vocabulary after token i, for the
    answer's positions (i ≥ prompt_length - 1), so that a restricted support still sees the mass outside it.
    """

    tokens: torch.Tensor
    prompt_length: int
    features: torch.Tensor
    final: torch.Tensor
    log_totals: torch.Tensor
    kind: int
    index: int
    visit: int | None = None  # how often it was taken before, where that is counted: other anchors are drawn then

    def __post_init__(self) -> None:
        n = self.tokens.shape[0]
        if not (0 < self.prompt_length < n and self.features.shape[0] == n and self.final.shape[0] == n):
            raise ValueError(
                f"a sequence of {n} tokens with prompt {self.prompt_length} and {self.features.shape[0]} features"
            )


class ShardWriter:
    """Collects examples and writes ``<stem>-00000.safetensors`` … every ``tokens_per_shard`` tokens."""

    def __init__(self, folder: Path, stem: str, tokens_per_shard: int, metadata: dict):
        self.folder, self.stem, self.limit = folder, stem, tokens_per_shard
        self.metadata = {key: json.dumps(value) for key, value in metadata.items()}
        self.pending: list[Example] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.count = len(list(folder.glob(f"{stem}-*.safetensors")))

    def add(self, example: Example) -> None:
        self.pending.append(example)
        if sum(e.tokens.shape[0] for e in self.pending) >= self.limit:
            self.flush()

    def flush(self) -> None:
        if not self.pending:
            return
        examples, self.pending = self.pending, []
        tensors = {
            "tokens": torch.cat([e.tokens for e in examples]).to(torch.int32),
            "features": torch.cat([e.features for e in examples]),
            "final": torch.cat([e.final for e in examples]),
            "log_totals": torch.cat([e.log_totals for e in examples]).float(),
            "lengths": torch.tensor([e.tokens.shape[0] for e in examples]),
            "prompt_lengths": torch.tensor([e.prompt_length for e in examples]),
            "prompt_index": torch.tensor([e.index for e in examples]),
            "kind": torch.tensor([e.kind for e in examples], dtype=torch.uint8),
        }
        path = self.folder / f"{self.stem}-{self.count:05d}.safetensors"
        partial = path.with_suffix(".partial")
        save_file(tensors, partial, metadata=self.metadata)
        os.replace(partial, path)
        self.count += 1


def read_shard(path: Path) -> list[Example]:
    """The examples of one shard (memory-mapped until touched)."""
    with safe_open(path, "pt") as f:
        t = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118 - it has keys(), but cannot be iterated
    examples, start = [], 0
    for i, n in enumerate(t["lengths"].tolist()):
        rows = slice(start, start + n)
        prompt, kind, index = int(t["prompt_lengths"][i]), int(t["kind"][i]), int(t["prompt_index"][i])
        parts = t["tokens"][rows], prompt, t["features"][rows], t["final"][rows], t["log_totals"][rows]
        examples.append(Example(*parts, kind, index))
        start += n
    return examples


def finished_indices(paths: Sequence[Path]) -> set[int]:
    """Indices of the prompts that these shards already hold."""
    done: set[int] = set()
    for path in paths:
        with safe_open(path, "pt") as f:
            done.update(f.get_tensor("prompt_index").tolist())
    return done


def check_shards(paths: Sequence[Path], expected: dict) -> None:
    """Raise ValueError if a shard was made with other settings than ``expected`` (target, layers, …)."""
    for path in paths:
        with safe_open(path, "pt") as f:
            found = {key: json.loads(value) for key, value in (f.metadata() or {}).items()}
        differing = {k: (found.get(k), v) for k, v in expected.items() if found.get(k) != v}
        if differing:
            raise ValueError(
                f"{path} was made with other settings (found, expected): {differing}; use another work folder"
            )
