"""Real speculative decoding with a draft, in plain torch: what the tables and the calibration are measured on.

Batched over requests, one round at a time: draft the block with its sequential head, verify γ+1 rows with the target,
judge by the server's own rules (`dspark_kernels`), commit. A request's numbers depend on its index and the seed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dspark_kernels import (
    AcceptResult,
    AcceptRule,
    BlockDraft,
    RaggedBatch,
    RequestRules,
    SamplingRows,
    StepNoise,
    Verified,
    accept,
    draw,
    draw_noise,
    first_argmax,
    probabilities,
    sample_block,
)
from sglang_dspark.training.generate import Request
from sglang_dspark.training.model import TrainableDraft
from sglang_dspark.training.target import SlotView, Target


@dataclass
class Rounds:
    """What happened, one row per finished round: kind [n], accepted [n] drafted tokens, committed [n] with the bonus,
    overlap [n, γ] = Σ min(p, q) where reached, confidence logits [n, γ] of each head, and the texts.
    """

    kinds: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    cut: list[bool] = field(default_factory=list)
    overlap: list[list[float]] = field(default_factory=list)
    confidence: dict[str, list[list[float]]] = field(default_factory=dict)
    sequences: dict[int, list[int]] = field(default_factory=dict)


class Speculator:
    """Decodes groups of requests with ``draft`` at one temperature, up to ``max_new`` tokens each.

    ``head``: False turns the sequential head off (what the block would do as a DFlash draft). ``rule``: "token" or
    "block" (the server's own for requests without a seed).
    """

    def __init__(
        self,
        target: Target,
        draft: TrainableDraft,
        temperature: float,
        max_new: int,
        seed: int = 0,
        head: bool = True,
        rule: str = "token",
    ):
        self.target, self.draft, self.temperature, self.max_new, self.seed = target, draft, temperature, max_new, seed
        self.head = draft.markov_head if head else None
        self.rule = AcceptRule.GREEDY if temperature == 0 else AcceptRule[rule.upper()]
        self.gamma = draft.config.block_size
        self.rounds = Rounds()
        self.dtype = draft.fc.weight.dtype

    @torch.inference_mode()
    def run(self, requests: Sequence[Request], batch: int = 16) -> Rounds:
        """Decode all requests, near-equal lengths together."""
        ordered = sorted(requests, key=lambda r: len(r.ids))
        for start in range(0, len(ordered), batch):
            _Group(self, ordered[start : start + batch]).run()
        return self.rounds

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The draft's context [..., d] of the target's features [..., m, d]."""
        return self.draft.fuse(features.flatten(-2).to(self.dtype))

    def commit(self, request, text, new, accepted, overlap, confidence) -> bool:
        """Append a round's tokens up to a stop or the limit, record it; whether the request goes on."""
        stop = next((j for j, token in enumerate(new) if token in self.target.stop_ids), None)
        kept = new if stop is None else new[: stop + 1]
        kept = kept[: self.max_new - len(text)]
        text.extend(kept)
        r = self.rounds
        r.kinds.append(request.kind), r.accepted.append(accepted), r.committed.append(len(kept))
        r.cut.append(len(kept) < len(new)), r.overlap.append(overlap.tolist())
        for name, logits in confidence.items():
            r.confidence.setdefault(name, []).append(logits.tolist())
        return stop is None and len(text) < self.max_new


class _Group:
    """Requests that are decoded together, and what they have come to: the prompts are run when it is made."""

    def __init__(self, speculator: Speculator, requests: Sequence[Request]):
        self.speculator, self.requests = speculator, requests
        s, device, b = speculator, speculator.target.device, len(requests)
        longest = max(len(r.ids) for r in requests)
        capacity = longest + s.max_new + s.gamma + 2
        self.cache = s.target.new_cache(b, capacity)
        self.context = torch.zeros(b, capacity, s.draft.config.hidden_size, dtype=s.dtype, device=device)
        ids = torch.zeros(b, longest, dtype=torch.int64)
        for i, r in enumerate(requests):
            ids[i, : len(r.ids)] = torch.tensor(r.ids)
        # Committed and fed; the anchor comes next.
        self.lengths = torch.tensor([len(r.ids) for r in requests], device=device)
        features, final = s.target.forward(
            ids.to(device), SlotView.at(self.cache, torch.arange(longest, device=device).expand(b, -1))
        )
        self.context[:, :longest] = s.fuse(features)
        self.rows = SamplingRows.of([s.temperature] * b, device=device)
        self.rules = RequestRules.of([s.rule] * b, device=device)
        self.seeds = torch.tensor([(s.seed << 32) + r.index for r in requests], device=device)
        self.round = 0
        self.anchors = self._first(s.target.logits(final[torch.arange(b, device=device), self.lengths - 1]))
        self.texts = [[token] for token in self.anchors.tolist()]
        self.alive = [text[0] not in s.target.stop_ids for text in self.texts]

    def run(self) -> None:
        """Decode until every request is done."""
        while any(self.alive):
            self._decode()
        for request, text in zip(self.requests, self.texts, strict=True):
            self.speculator.rounds.sequences[request.index] = text

    def _noise(self) -> StepNoise:
        steps = torch.full_like(self.seeds, self.round)
        self.round += 1
        return draw_noise(self.seeds, steps, self.lengths, self.speculator.gamma, self.rules)

    def _first(self, logits: torch.Tensor) -> torch.Tensor:
        """The token after the prompt, from logits [b, V]."""
        noise = self._noise()
        if noise.coins is None:
            return first_argmax(logits)
        return draw(probabilities(logits, self.rows), noise.coins.final[:, 0])

    def _propose(self, noise: StepNoise) -> tuple[BlockDraft, dict[str, torch.Tensor]]:
        """The block, and the heads' confidence logits [b, γ]."""
        draft, width = self.speculator.draft, int(self.lengths.max())
        hidden = draft.blocks(self.context[:, :width], self.anchors[:, None], self.lengths[:, None])[:, 0]
        support = draft.draft_token_ids if draft.config.restricted else None
        head, base = self.speculator.head, draft.base_logits(hidden)
        block = sample_block(head, base, hidden, self.anchors, self.rows, noise, support)
        before = torch.cat([self.anchors[:, None], block.tokens[:, :-1]], 1)
        present = {"main": draft.confidence_head, "hidden": draft.hidden_confidence_head}
        return block, {
            kind: draft.confidence_logits(hidden, before, kind) for kind, head in present.items() if head is not None
        }

    def _verify(self, block: BlockDraft, noise: StepNoise) -> AcceptResult:
        """Run the target over whole blocks, keep the context of every row, judge."""
        s, b = self.speculator, len(self.requests)
        batch = RaggedBatch.pack(self.anchors, block.tokens, torch.full_like(self.lengths, s.gamma), self.lengths)
        fed, positions = batch.input_ids.view(b, -1), batch.positions.view(b, -1)
        features, final = s.target.forward(fed, SlotView.at(self.cache, positions))
        self.context[torch.arange(b, device=positions.device)[:, None], positions] = s.fuse(features)
        return accept(Verified(s.target.logits(final).flatten(0, 1), batch, block, self.rows, noise))

    def _decode(self) -> None:
        """One round of every request; those that are done are run along, and not kept."""
        noise = self._noise()
        block, confidence = self._propose(noise)
        result = self._verify(block, noise)
        for i, count in enumerate(result.lengths.tolist()):
            if self.alive[i]:
                new = result.tokens[i, :count].tolist()
                heads = {kind: logits[i] for kind, logits in confidence.items()}
                self.alive[i] = self.speculator.commit(
                    self.requests[i], self.texts[i], new, count - 1, result.acceptance[i], heads
                )
                if self.alive[i]:
                    self.lengths[i] += count
                    self.anchors[i] = new[-1]
