"""The target's own answers with its features, by continuous batching: a finished slot is refilled at once.

The features come free with generation (the target computes them to speak), and they are exactly what a server sees.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sglang_dspark.training.shards import Example
from sglang_dspark.training.target import SlotView, Target, sample


@dataclass(frozen=True)
class Request:
    """One prompt to answer: token ids, the temperature, its class (index into KINDS) and its index in the prompt
    list.
    """

    ids: tuple[int, ...]
    temperature: float
    kind: int
    index: int


class Generator:
    """Answers requests with up to ``batch`` slots and hands each finished sequence to ``sink``.

    Args:
        target: the model.
        batch: slots. max_new: answer tokens at most. max_prompt: longer prompts are refused (ValueError).
        sink: called with every finished ``Example``.
        seed: of the sampling.
    """

    def __init__(
        self, target: Target, batch: int, max_new: int, max_prompt: int, sink: Callable[[Example], None], seed: int = 0
    ):
        self.target, self.max_new, self.max_prompt, self.sink = target, max_new, max_prompt, sink
        self.capacity = max_prompt + max_new
        self.cache = target.new_cache(batch, self.capacity)
        m, d = len(target.layers), target.config.hidden_size
        self.tokens = torch.zeros(batch, self.capacity + 1, dtype=torch.int32)
        self.features = torch.zeros(batch, self.capacity + 1, m, d, dtype=target.dtype)
        self.final = torch.zeros(batch, self.capacity + 1, d, dtype=target.dtype)
        self.log_totals = torch.zeros(batch, self.capacity + 1)
        self.lengths = torch.zeros(batch, dtype=torch.int64)  # tokens of the slot, the newest not yet fed
        self.temperature = torch.zeros(batch)
        self.requests: list[Request | None] = [None] * batch
        self.random = torch.Generator(device=target.device).manual_seed(seed)
        self.generated = 0

    def run(self, requests: Sequence[Request], until: float | None = None, report: Callable[[int], None] | None = None):
        """Answer ``requests``; stop taking new ones at ``until`` (time.monotonic seconds). Returns the answered
        tokens.
        """
        queue = deque(requests)
        for request in queue:
            if len(request.ids) > self.max_prompt:
                raise ValueError(f"prompt {request.index} has {len(request.ids)} tokens, more than {self.max_prompt}")
        while queue or any(self.requests):
            if until is not None and time.monotonic() > until:
                queue.clear()
            self._refill(queue)
            if any(self.requests):
                self._decode()
            if not queue:
                self._shrink()
            if report is not None:
                report(self.generated)
        return self.generated

    def _refill(self, queue: deque[Request]) -> None:
        free = [row for row, request in enumerate(self.requests) if request is None]
        busy = len(self.requests) - len(free)
        # A prefill of many prompts together is cheaper per token: wait for an eighth of the slots.
        if not queue or (busy and len(free) < max(1, len(self.requests) // 8)):
            return
        while free and queue:
            group = [(free.pop(), queue.popleft()) for _ in range(min(len(free), len(queue), 16))]
            self._prefill([row for row, _ in group], [request for _, request in group])

    def _prefill(self, rows: list[int], requests: list[Request]) -> None:
        lengths = torch.tensor([len(r.ids) for r in requests])
        ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
        for i, request in enumerate(requests):
            ids[i, : len(request.ids)] = torch.tensor(request.ids)
        positions = torch.arange(ids.shape[1]).expand(len(rows), -1).to(self.target.device)
        index = torch.tensor(rows)
        view = SlotView.at(self.cache, positions, index.to(self.target.device), keep=int(self.lengths.max()))
        features, final = self.target.forward(ids.to(self.target.device), view)
        n = ids.shape[1]
        self.tokens[index, :n], self.features[index, :n], self.final[index, :n] = ids.int(), features.cpu(), final.cpu()
        self.lengths[index] = lengths
        self.temperature[index] = torch.tensor([r.temperature for r in requests])
        for row, request in zip(rows, requests, strict=True):
            self.requests[row] = request
        self._append(index, final[torch.arange(len(rows)), lengths - 1])

    def _decode(self) -> None:
        rows = torch.arange(len(self.requests))
        fed = (self.lengths - 1).clamp_min(
            0
        )  # idle slots recompute position 0 of themselves: harmless, and keeps the batch
        positions = fed[:, None].to(self.target.device)
        ids = self.tokens[rows, fed].long()[:, None].to(self.target.device)
        features, final = self.target.forward(ids, SlotView.at(self.cache, positions))
        self.features[rows, fed], self.final[rows, fed] = features[:, 0].cpu(), final[:, 0].cpu()
        active = torch.tensor([row for row, request in enumerate(self.requests) if request is not None])
        self._append(active, final[active.to(final.device), 0])

    def _append(self, rows: torch.Tensor, final: torch.Tensor) -> None:
        """Sample one token for each of ``rows`` from its final hidden state; finish what has ended."""
        logits = self.target.logits(final)
        tokens = sample(logits, self.temperature[rows].to(logits.device), self.random).cpu()
        self.log_totals[rows, self.lengths[rows] - 1] = logits.logsumexp(-1).cpu()
        self.tokens[rows, self.lengths[rows]] = tokens.int()
        self.lengths[rows] += 1
        self.generated += len(rows)
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            request, length = self.requests[row], int(self.lengths[row])
            if token in self.target.stop_ids or length - len(request.ids) >= self.max_new:
                self._finish(row)

    def _finish(self, row: int) -> None:
        request, n = self.requests[row], int(self.lengths[row])
        self.features[row, n - 1], self.final[row, n - 1] = 0, 0
        buffers = self.tokens, self.features, self.final, self.log_totals
        tokens, features, final, totals = (buffer[row, :n].clone() for buffer in buffers)
        self.requests[row] = None
        self.lengths[row] = 0
        if n - len(request.ids) >= 3:
            self.sink(Example(tokens, len(request.ids), features, final, totals, request.kind, request.index))

    def _shrink(self) -> None:
        """With no more prompts waiting, half-empty batches are packed so that the last answers do not cost full
        steps.
        """
        active = [row for row, request in enumerate(self.requests) if request is not None]
        if not active or len(active) > len(self.requests) // 2:
            return
        rows = torch.tensor(active)
        self.cache = self.cache.select(rows.to(self.target.device))
        self.tokens, self.features, self.final = self.tokens[rows], self.features[rows], self.final[rows]
        self.lengths, self.temperature, self.log_totals = (
            self.lengths[rows],
            self.temperature[rows],
            self.log_totals[rows],
        )
        self.requests = [self.requests[row] for row in active]
