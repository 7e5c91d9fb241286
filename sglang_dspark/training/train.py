"""The training loop: one process, or several that each step on their own data and average their weights by the clock.

Averaging every few seconds (local SGD) instead of every step keeps slow or interrupted processes from holding up the
others: each contributes in proportion to the steps it managed.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from sglang_dspark.training.answers import open_target
from sglang_dspark.training.build import continue_from, new_draft
from sglang_dspark.training.data import Batch, make_batch, shard_tokens, stream, support_of
from sglang_dspark.training.loss import DistributionLoss, LossWeights, confidence_loss, expected_length
from sglang_dspark.training.model import TrainableDraft
from sglang_dspark.training.settings import TrainSettings
from sglang_dspark.training.shards import Example, read_shard
from sglang_dspark.training.stream import AnswerStream, answered_tokens

SYNC_SECONDS = 15.0


@dataclass
class StepResult:
    """What one pass over a batch yields: the loss (with graph), overlaps and argmax agreement [b, A, γ], valid
    slots.
    """

    loss: torch.Tensor
    overlap: torch.Tensor
    agree: torch.Tensor
    valid: torch.Tensor
    confidence: dict[str, torch.Tensor]


def label_map(draft: TrainableDraft) -> torch.Tensor:
    """[V] int64: target id -> index in the draft's vocabulary, -1 where the draft cannot propose it."""
    c = draft.config
    table = torch.full((c.vocab_size,), -1, device=draft.fc.weight.device)
    ids = draft.token_ids(torch.arange(c.support_size, device=table.device))
    table[ids] = torch.arange(c.support_size, device=table.device)
    return table


def forward_loss(draft: TrainableDraft, batch: Batch, table: torch.Tensor, settings: TrainSettings) -> StepResult:
    """The loss of paper Eq. 9-12 over a batch; the weights decay with the slot (DeepSpec's constant, 4)."""
    c, shape = draft.config, batch.valid.shape
    hidden = draft.blocks(draft.fuse(batch.features), batch.tokens, batch.positions)
    slots = torch.arange(c.block_size, device=hidden.device)
    weights = torch.exp(-slots / settings.decay) * batch.valid
    weights = (weights / weights.sum().clamp_min(1e-6)).flatten()
    flat, previous = hidden.flatten(0, 2), batch.previous.flatten()
    head = draft.markov_head
    latents = None if head is None else head.block_latents(batch.previous, hidden).flatten(0, 2)
    loss, overlap, agree = DistributionLoss.apply(
        flat,
        latents,
        draft.lm_head.to(flat.dtype),
        None if head is None else head.markov_w2.weight,
        batch.final.flatten(0, 2).to(flat.dtype),
        batch.log_totals.flatten(),
        table[batch.labels.flatten()],
        weights,
        LossWeights(settings.ce, settings.tv, measure=not torch.is_grad_enabled()),
    )
    confidence = {}
    for name, present in (("main", draft.confidence_head), ("hidden", draft.hidden_confidence_head)):
        if present is not None:
            seen = flat if settings.confidence_reaches_backbone else flat.detach()
            logits = draft.confidence_logits(seen, previous, name)
            loss = loss + confidence_loss(logits, overlap, weights)
            confidence[name] = logits.detach().view(shape)
    return StepResult(loss, overlap.view(shape), agree.view(shape), batch.valid, confidence)


class Trainer:
    """Trains one draft in ``work``; ``worker`` of ``workers`` processes. Resumes from ``work/checkpoint.pt``."""

    def __init__(self, settings: TrainSettings, layers: tuple[int, ...], work: Path, worker: int = 0, workers: int = 1):
        torch.set_num_threads(settings.threads)
        self.settings, self.work, self.worker, self.workers = settings, work, worker, workers
        target = open_target(settings, layers)
        self.draft = new_draft(settings, target, layers)
        self._set_vocabulary(target)
        if settings.start_from is not None:
            continue_from(self.draft, settings.start_from)
        self.answers = self._answer_stream(target)
        del target
        self.table = label_map(self.draft)
        self.rng = random.Random(settings.seed + worker)
        self.optimizer = torch.optim.AdamW(
            self.draft.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.step, self.elapsed, self.anchors = 0, 0.0, 0
        self.log: list[dict] = []
        self._averaged_at, self._finished = 0, False
        if (work / "checkpoint.pt").exists():
            self._resume()

    def _set_vocabulary(self, target) -> None:
        c = self.draft.config
        if not c.restricted:
            return
        path = self.work / f"vocabulary-{c.support_size}.json"
        if path.exists():
            ids = torch.tensor(json.loads(path.read_text()))
        else:
            answered, shards = self.settings.answered, self.work / "shards"
            texts = shard_tokens(shards) if answered is None else answered_tokens(Path(answered), target.path.name)
            ids = support_of(texts, c.vocab_size, c.support_size, sorted(target.stop_ids))
            partial = path.with_suffix(f".partial-{os.getpid()}")
            partial.write_text(json.dumps(ids.tolist()))
            os.replace(partial, path)
        self.draft.draft_token_ids.copy_(ids)

    def _answer_stream(self, target) -> AnswerStream | None:
        """Where answers are read as token ids; continued at the sequence where an earlier run stopped."""
        s = self.settings
        if s.answered is None:
            return None
        path = self._stream_path
        state = json.loads(path.read_text()) if path.exists() else None
        return AnswerStream(Path(s.answered), target, self.worker, self.workers, s.seed, state)

    @property
    def _stream_path(self) -> Path:
        return self.work / f"stream-{self.worker}-of-{self.workers}.json"

    def _sequences(self) -> Iterator[Example]:
        if self.answers is not None:
            return iter(self.answers)
        return stream(self.work / "shards", self.worker, self.workers, self.settings.seed + self.step)

    def _save_stream(self) -> None:
        if self.answers is not None:
            partial = self._stream_path.with_suffix(".partial")
            partial.write_text(json.dumps(self.answers.state))
            os.replace(partial, self._stream_path)

    def progress(self) -> float:
        """0 at the start, 1 when the steps or the minutes are used up."""
        return min(1.0, max(self.step / self.settings.steps, self.elapsed / (60 * self.settings.minutes)))

    def learning_rate(self) -> float:
        """Linear warm-up, then a cosine to zero, over the run's progress."""
        progress, warmup = self.progress(), self.settings.warmup
        if progress < warmup:
            return self.settings.learning_rate * max(progress / warmup, 1e-2)
        return self.settings.learning_rate * 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))

    def run(
        self, report: Callable[[dict], None] | None = None, save: Callable[[TrainableDraft, dict], None] | None = None
    ):
        """Train until the budget is used; ``save`` gets the draft and the newest measures at every checkpoint."""
        sequences = self._sequences()
        start, last_sync, last_save = time.monotonic() - self.elapsed, time.monotonic(), time.monotonic()
        recent: list[float] = []
        while not self._finished:
            recent.append(self._train_step([next(sequences) for _ in range(self.settings.sequences_per_step)]))
            now = time.monotonic()
            self.elapsed = now - start
            if self.workers == 1:
                self._finished = self.progress() >= 1
            elif now - last_sync > SYNC_SECONDS or self.progress() >= 1:
                self._average()
                self._save_stream()
                last_sync = time.monotonic()
            if report is not None and self.step % 10 == 0:
                length = sum(recent[-100:]) / len(recent[-100:])
                report({"step": self.step, "progress": self.progress(), "length": length})
            if self.worker == 0 and (self._finished or now - last_save > 60 * self.settings.checkpoint_minutes):
                self._checkpoint(save, sum(recent[-300:]) / len(recent[-300:]))
                last_save = time.monotonic()
        return self.log

    def _train_step(self, examples) -> float:
        batch = make_batch(examples, self.settings.anchors, self.settings.gamma, self.rng)
        batch = batch.to(
            self.settings.device, self.draft.fc.weight.dtype if self.settings.dtype == "float32" else torch.bfloat16
        )
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        with self._autocast():
            result = forward_loss(self.draft, batch, self.table, self.settings)
        self.optimizer.zero_grad(set_to_none=True)
        result.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), self.settings.clip)
        self.optimizer.step()
        self.step += 1
        whole = result.valid.all(-1)
        self.anchors += int(result.valid[..., 0].sum())
        return float(expected_length(result.overlap[whole], result.valid[whole]).mean()) if whole.any() else 1.0

    def _autocast(self):
        return torch.autocast(self.settings.device, torch.bfloat16, enabled=self.settings.dtype == "bfloat16")

    def _average(self) -> None:
        """Weights averaged over the processes by the steps each made since the last time; the moments stay local.

        Whether to stop is decided here, together: a process that stopped alone would leave the others waiting for it.
        """
        made = torch.tensor([float(self.step - self._averaged_at), float(self.progress() >= 1)])
        total = made.clone()
        dist.all_reduce(total)
        flat = torch.nn.utils.parameters_to_vector(self.draft.parameters()).detach() * made[0]
        dist.all_reduce(flat)
        torch.nn.utils.vector_to_parameters(flat / total[0].clamp_min(1), self.draft.parameters())
        self._averaged_at, self._finished = self.step, bool(total[1] > 0)

    @torch.no_grad()
    def evaluate(self, sequences: int = 120, anchors: int = 8) -> dict:
        """Teacher-forced measures on ``work/held`` (never trained on): expected accepted length, overlap and
        agreement.
        """
        paths = sorted((self.work / "held").rglob("*.safetensors"))
        examples = [e for path in paths for e in read_shard(path)][:sequences]
        if not examples:
            return {}
        rng, overlaps, agrees, valids = random.Random(0), [], [], []
        for i in range(0, len(examples), 8):
            batch = make_batch(examples[i : i + 8], anchors, self.settings.gamma, rng)
            batch = batch.to(
                self.settings.device, torch.bfloat16 if self.settings.dtype == "bfloat16" else torch.float32
            )
            with self._autocast():
                result = forward_loss(self.draft, batch, self.table, self.settings)
            overlaps.append(result.overlap.flatten(0, 1)), agrees.append(result.agree.flatten(0, 1))
            valids.append(result.valid.flatten(0, 1))
        overlap, agree, valid = torch.cat(overlaps), torch.cat(agrees).float(), torch.cat(valids)
        whole = valid.all(-1)
        return {
            "held_length": float(expected_length(overlap[whole], valid[whole]).mean()),
            "held_agree_length": float(expected_length(agree[whole], valid[whole]).mean()),
            "overlap": [round(float(x), 4) for x in overlap[whole].mean(0)],
        }

    def _checkpoint(self, save, train_length: float) -> None:
        self._save_stream()
        measures = {"step": self.step, "minutes": round(self.elapsed / 60, 2), "anchors": self.anchors * self.workers}
        measures |= {"train_length": round(train_length, 4), **self.evaluate()}
        self.log.append(measures)
        state = {
            "draft": self.draft.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "elapsed": self.elapsed,
            "anchors": self.anchors,
            "log": self.log,
        }
        partial = self.work / "checkpoint.partial"
        torch.save(state, partial)
        os.replace(partial, self.work / "checkpoint.pt")
        if save is not None:
            save(self.draft, measures)

    def _resume(self) -> None:
        state = torch.load(self.work / "checkpoint.pt", map_location=self.settings.device, weights_only=True)
        self.draft.load_state_dict(state["draft"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.elapsed, self.anchors, self.log = (state[k] for k in ("step", "elapsed", "anchors", "log"))
        self._averaged_at, self._finished = self.step, self.progress() >= 1
