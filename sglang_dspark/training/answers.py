"""The stage that fills the shards: the target answers prompts, and reads packaged texts, in any number of processes.

Every worker takes each ``workers``-th prompt, skips what earlier runs finished, and stops at the time limit; running it
again continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from sglang_dspark.prompts.prompts import KINDS, Prompt, encode, load_prompts
from sglang_dspark.prompts.sources import raw_texts
from sglang_dspark.training.generate import Generator, Request
from sglang_dspark.training.settings import TrainSettings
from sglang_dspark.training.shards import Example, ShardWriter, finished_indices
from sglang_dspark.training.target import Target

TEXT_WINDOW, TEXT_PROMPT = 256, 16


def open_target(settings: TrainSettings, layers: Sequence[int]) -> Target:
    """The target with feature capture as the settings ask."""
    return Target(settings.target, layers, settings.device, getattr(torch, settings.dtype))


def shard_metadata(settings: TrainSettings, layers: Sequence[int]) -> dict:
    """What a shard depends on: mixing shards that differ here would train on wrong features."""
    return {"target": str(settings.target), "layers": list(layers), "dtype": settings.dtype}


def requests_of(prompts: Sequence[Prompt], tokenizer, settings: TrainSettings) -> list[Request]:
    """Encoded requests; prompts that are too long are left out. Near in length stay near in the list (less padding)."""
    requests = []
    for index, prompt in enumerate(prompts):
        ids = encode(prompt, tokenizer)
        if 0 < len(ids) <= settings.max_prompt:
            requests.append(Request(ids, prompt.temperature, KINDS.index(prompt.kind), index))
    window = 16 * settings.generation_batch
    groups = [sorted(requests[i : i + window], key=lambda r: len(r.ids)) for i in range(0, len(requests), window)]
    return [request for group in groups for request in group]


def answer_worker(
    settings: TrainSettings,
    layers: Sequence[int],
    work: Path,
    worker: int = 0,
    workers: int = 1,
    report: Callable[[int], None] | None = None,
) -> int:
    """Answer this worker's share of ``work/prompts.jsonl`` into ``work/shards``; returns the answered tokens."""
    torch.set_num_threads(settings.threads)
    target = open_target(settings, layers)
    folder = work / "shards"
    writer = ShardWriter(folder, f"answers-{worker}", settings.shard_tokens, shard_metadata(settings, layers))
    done = finished_indices(sorted(folder.glob("answers-*.safetensors")))
    requests = requests_of(load_prompts(work / "prompts.jsonl"), target.tokenizer, settings)
    mine = [r for r in requests if r.index % workers == worker and r.index not in done]
    seed = settings.seed + 1000 * worker + writer.count
    generator = Generator(target, settings.generation_batch, settings.max_new, settings.max_prompt, writer.add, seed)
    generated = generator.run(mine, time.monotonic() + 60 * settings.generation_minutes, report)
    writer.flush()
    return generated


def text_worker(
    settings: TrainSettings, layers: Sequence[int], work: Path, report: Callable[[int], None] | None = None
) -> int:
    """Capture ``text_tokens`` tokens of packaged text in windows: a prefill's price, and the loss needs no answer."""
    torch.set_num_threads(settings.threads)
    target = open_target(settings, layers)
    folder = work / "shards"
    writer = ShardWriter(folder, "texts-0", settings.shard_tokens, shard_metadata(settings, layers))
    done = finished_indices(sorted(folder.glob("texts-*.safetensors")))
    total = len(done) * TEXT_WINDOW
    batch: list[tuple[int, list[int]]] = []
    for index, text in enumerate(raw_texts(settings.seed)):
        if total >= settings.text_tokens:
            break
        ids = target.tokenizer(text, add_special_tokens=False).input_ids[:TEXT_WINDOW]
        if index in done or len(ids) < TEXT_WINDOW:
            continue
        batch.append((index, ids))
        total += TEXT_WINDOW
        if len(batch) == 8:
            _capture(target, batch, writer)
            batch = []
        if report is not None:
            report(total)
    if batch:
        _capture(target, batch, writer)
    writer.flush()
    return total


def _capture(target: Target, batch: list[tuple[int, list[int]]], writer: ShardWriter) -> None:
    ids = torch.tensor([ids for _, ids in batch])
    features, final = target.forward(ids.to(target.device))
    totals = torch.stack([target.logits(row).logsumexp(-1) for row in final]).cpu()
    features, final, totals = features.cpu().clone(), final.cpu().clone(), totals.clone()  # out of inference mode
    features[:, -1], final[:, -1] = 0, 0
    for row, (index, _) in enumerate(batch):
        kind = KINDS.index("text")
        parts = features[row].clone(), final[row].clone(), totals[row]
        writer.add(Example(ids[row].int(), TEXT_PROMPT, *parts, kind, index))
