"""From shards to training batches: sequences shuffled across shards, anchors drawn inside each sequence's answer."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_dspark.training.shards import Example, read_shard


@dataclass
class Batch:
    """``b`` padded sequences with ``A`` blocks each.

    features [b, n, m·d]; tokens, positions [b, A] int64: anchors and their places; previous, labels [b, A, γ] int64:
    the token before each slot and the one it should predict (target ids); final [b, A, γ, d], log_totals [b, A, γ]:
    the target's state that predicts the same token; valid [b, A, γ] bool: a contiguous prefix of each block.
    """

    features: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    previous: torch.Tensor
    labels: torch.Tensor
    final: torch.Tensor
    log_totals: torch.Tensor
    valid: torch.Tensor

    def to(self, device: str, dtype: torch.dtype) -> Batch:
        moved = {name: tensor.to(device) for name, tensor in vars(self).items()}
        moved["features"], moved["final"] = moved["features"].to(dtype), moved["final"].to(dtype)
        return Batch(**moved)


def make_batch(examples: Sequence[Example], anchors: int, gamma: int, rng: random.Random) -> Batch:
    """Draw up to ``anchors`` distinct anchors of every sequence (from its first answer token on) and gather their
    blocks.

    A sequence with fewer gives blocks that are invalid throughout, so shapes stay rectangular.
    """
    longest = max(e.tokens.shape[0] for e in examples)
    m_d = examples[0].features[0].numel()
    features = torch.zeros(len(examples), longest, m_d, dtype=examples[0].features.dtype)
    columns: dict[str, list[torch.Tensor]] = {
        name: [] for name in ("positions", "previous", "labels", "final", "totals", "valid")
    }
    for row, e in enumerate(examples):
        n = e.tokens.shape[0]
        features[row, :n] = e.features.flatten(1)
        chosen = _anchors(e, anchors, rng)
        padded = torch.tensor(chosen + [e.prompt_length] * (anchors - len(chosen)))
        slots = padded[:, None] + torch.arange(gamma)
        valid = (slots < n - 1) & (torch.arange(anchors) < len(chosen))[:, None]
        inside = slots.clamp_max(n - 2)
        tokens = e.tokens.long()
        columns["positions"].append(padded)
        columns["previous"].append(tokens[inside])
        columns["labels"].append(tokens[inside + 1])
        columns["final"].append(e.final[inside])
        columns["totals"].append(e.log_totals[inside])
        columns["valid"].append(valid)
    c = {name: torch.stack(tensors) for name, tensors in columns.items()}
    anchors_of = c["previous"][..., 0]
    return Batch(features, anchors_of, c["positions"], c["previous"], c["labels"], c["final"], c["totals"], c["valid"])


def _anchors(example: Example, count: int, rng: random.Random) -> list[int]:
    """Up to `count` anchors of an example, ascending. Of one that was taken before, those that were not drawn yet, until
    all were."""
    candidates = range(example.prompt_length, example.tokens.shape[0] - 1)
    count = min(count, len(candidates))
    if example.visit is None:
        return sorted(rng.sample(candidates, count))
    order = random.Random(example.index).sample(candidates, len(candidates))
    start = example.visit * count
    return sorted(order[(start + i) % len(order)] for i in range(count))


def stream(folder: Path, worker: int, workers: int, seed: int, mixed: int = 4) -> Iterator[Example]:
    """Sequences of the folder's shards for ever, ``mixed`` shards shuffled together; every pass sees new shards too.

    Raises ValueError where the folder holds no shard.
    """
    rng = random.Random(seed * 1009 + worker)
    while True:
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise ValueError(f"{folder} holds no shards: run the answers stage first")
        mine = [p for i, p in enumerate(paths) if i % workers == worker] or paths
        rng.shuffle(mine)
        for start in range(0, len(mine), mixed):
            pool = [example for path in mine[start : start + mixed] for example in read_shard(path)]
            pool = [e for e in pool if e.tokens.shape[0] - e.prompt_length >= 2]
            rng.shuffle(pool)
            yield from pool


def shard_tokens(folder: Path) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(prompt's ids, answer's ids) of every example in the folder's shards, int64."""
    for path in sorted(folder.glob("*.safetensors")):
        for e in read_shard(path):
            yield e.tokens[: e.prompt_length].long(), e.tokens[e.prompt_length :].long()


def support_of(
    texts: Iterable[tuple[torch.Tensor, torch.Tensor]], vocab_size: int, size: int, always: Sequence[int]
) -> torch.Tensor:
    """The ``size`` most frequent ids of the answers in (prompt, answer), sorted, with ``always`` among them -> [size]."""
    # Ids that no answer has used yet rank by their own order: byte-pair merges are learnt from the frequent to the
    # rare.
    counts = 1e-3 * (1 - torch.arange(vocab_size) / vocab_size)
    for prompt, answer in texts:
        counts += torch.bincount(answer, minlength=vocab_size)
        counts += 0.02 * torch.bincount(prompt, minlength=vocab_size)  # a prompt's tokens come back in answers
    counts[list(always)] = float("inf")
    return torch.sort(counts.topk(size).indices).values
