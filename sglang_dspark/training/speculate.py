"""Real speculative decoding with a draft, in plain torch: what the tables and the calibration are measured on.

Batched over requests, one round at a time: draft the block with its sequential head, verify γ+1 rows with the target,
judge (token by token, or the block as a whole, each with its exact residual), commit. One float32 law makes q and p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dspark_kernels.accept import block_thresholds, joint_scales
from sglang_dspark.training.generate import Request
from sglang_dspark.training.model import TrainableDraft
from sglang_dspark.training.target import SlotView, Target, draw


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


def law(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """float32 probabilities of logits [..., V] at a temperature; at 0 all mass on the argmax."""
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.softmax(logits.float() / temperature, -1)


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
        self.target, self.draft, self.temperature, self.max_new, self.head = target, draft, temperature, max_new, head
        self.rule = rule
        self.gamma = draft.config.block_size
        self.random = torch.Generator(device=target.device).manual_seed(seed)
        self.rounds = Rounds()
        self.dtype = draft.fc.weight.dtype

    @torch.inference_mode()
    def run(self, requests: Sequence[Request], batch: int = 16) -> Rounds:
        """Decode all requests, near-equal lengths together."""
        ordered = sorted(requests, key=lambda r: len(r.ids))
        for start in range(0, len(ordered), batch):
            self._run_group(ordered[start : start + batch])
        return self.rounds

    def _run_group(self, requests: list[Request]) -> None:
        device, b = self.target.device, len(requests)
        longest = max(len(r.ids) for r in requests)
        capacity = longest + self.max_new + self.gamma + 2
        cache = self.target.new_cache(b, capacity)
        context = torch.zeros(b, capacity, self.draft.config.hidden_size, dtype=self.dtype, device=device)
        ids = torch.zeros(b, longest, dtype=torch.int64)
        for i, r in enumerate(requests):
            ids[i, : len(r.ids)] = torch.tensor(r.ids)
        lengths = torch.tensor(
            [len(r.ids) for r in requests], device=device
        )  # committed and fed; the anchor comes next
        positions = torch.arange(longest, device=device).expand(b, -1)
        features, final = self.target.forward(ids.to(device), SlotView.at(cache, positions))
        context[:, :longest] = self._fuse(features)
        first = self.target.logits(final[torch.arange(b, device=device), lengths - 1])
        anchors = draw(law(first, self.temperature), self.random)
        texts = [[int(token)] for token in anchors]
        alive = [int(token) not in self.target.stop_ids for token in anchors]
        while any(alive):
            self._round(requests, cache, context, anchors, lengths, texts, alive)
        for request, text in zip(requests, texts, strict=True):
            self.rounds.sequences[request.index] = text

    def _fuse(self, features: torch.Tensor) -> torch.Tensor:
        return self.draft.fuse(features.flatten(-2).to(self.dtype))

    def _propose(self, context, anchors, lengths):
        """Tokens [b, γ] (target ids), their laws q [b, γ, Vd], and the heads' confidence logits [b, γ]."""
        draft, width = self.draft, int(lengths.max())
        hidden = draft.blocks(context[:, :width], anchors[:, None], lengths[:, None])[:, 0]
        base = draft.base_logits(hidden)
        previous, state, tokens, laws = anchors, None, [], []
        for k in range(self.gamma):
            logits = base[:, k].float()
            if draft.markov_head is not None and self.head:
                bias, state = draft.markov_head.bias(previous, hidden[:, k], state)
                logits = logits + bias.float()
            q = law(logits, self.temperature)
            previous = draft.token_ids(draw(q, self.random))
            tokens.append(previous), laws.append(q)
        tokens = torch.stack(tokens, 1)
        before = torch.cat([anchors[:, None], tokens[:, :-1]], 1)
        confidence = {}
        if draft.confidence_head is not None:
            confidence["main"] = draft.confidence_logits(hidden, before).float()
        if draft.hidden_confidence_head is not None:
            confidence["hidden"] = draft.confidence_logits(hidden, before, "hidden").float()
        return tokens, torch.stack(laws, 1), confidence

    def _round(self, requests, cache, context, anchors, lengths, texts, alive) -> None:
        b, gamma, device = len(requests), self.gamma, self.target.device
        tokens, q, confidence = self._propose(context, anchors, lengths)
        rows = torch.arange(gamma + 1, device=device)
        positions = lengths[:, None] + rows
        fed = torch.cat([anchors[:, None], tokens], 1)
        features, final = self.target.forward(fed, SlotView.at(cache, positions))
        p = law(self.target.logits(final), self.temperature)
        accepted, bonus, overlap = judge(p, q, tokens, self.draft, self.random, self.rule)
        context[torch.arange(b, device=device)[:, None], positions] = self._fuse(features)
        for i in range(b):
            if alive[i]:
                n = int(accepted[i])
                new = tokens[i, :n].tolist() + [int(bonus[i])]
                alive[i] = self._commit(
                    requests[i], texts[i], new, n, overlap[i], {k: v[i] for k, v in confidence.items()}
                )
                if alive[i]:
                    lengths[i] += n + 1
                    anchors[i] = bonus[i]

    def _commit(self, request, text, new, accepted, overlap, confidence) -> bool:
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


def judge(p, q, tokens, draft: TrainableDraft, random: torch.Generator | None = None, rule: str = "token"):
    """Rejection sampling: p [b, γ+1, V], q [b, γ, Vd] float32 laws, tokens [b, γ] drafted target ids.

    Returns accepted [b] int64, the bonus token [b] (residual where rejected, target's law where all passed), and the
    overlap Σ min(p, q) [b, γ].
    """
    b, gamma, _ = q.shape
    support = draft.token_ids(torch.arange(q.shape[-1], device=q.device))
    wide = torch.zeros_like(p[:, :gamma])
    wide[..., support] = q
    chosen_p = p[:, :gamma].gather(-1, tokens[..., None])[..., 0]
    chosen_q = wide.gather(-1, tokens[..., None])[..., 0]
    coins = torch.rand(b, gamma, device=q.device, generator=random)
    row = torch.arange(b, device=q.device)
    if rule == "block":
        scales = joint_scales(chosen_p, chosen_q)
        scaled = torch.minimum(scales[:, :gamma, None] * p[:, :gamma], wide).sum(-1)
        accepted = ((coins < block_thresholds(scales, scaled)) * torch.arange(1, gamma + 1, device=q.device)).amax(-1)
        scale = scales[row, accepted][:, None]
    else:
        accepted, scale = (coins * chosen_q < chosen_p).long().cumprod(-1).sum(-1), 1.0
    at = accepted.clamp_max(gamma - 1)
    residual = (scale * p[row, at] - wide[row, at]).clamp_min(0)
    residual = torch.where((accepted == gamma)[:, None], p[:, gamma], residual)
    # A residual without mass means p = q up to rounding: the target's own law is then the exact answer.
    residual = torch.where(residual.sum(-1, keepdim=True) > 1e-8, residual, p[row, accepted])
    return accepted, draw(residual, random), torch.minimum(p[:, :gamma], wide).sum(-1)
