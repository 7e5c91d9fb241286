"""A draft's whole block as one function of tensors: sequential head, confidence and coins, for any mix of requests.

What a GPU captures behind the draft's backbone, as one graph per batch size. Nothing in it depends on what the batch
holds, so greedy, sampled, seeded and filtered requests replay side by side. `sample_block` draws the same tokens on a CPU
from groups of requests, which is quicker there and cannot be captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from .confidence import ConfidenceHead, block_confidence
from .mixed import mixed_draw, mixed_law
from .random import draw_coins
from .requests import RequestTensors
from .types import BlockDraft


class DraftModel(Protocol):
    """What a draft brings to `draft_block`."""

    markov_head: nn.Module | None
    confidence_head: ConfidenceHead | None
    draft_token_ids: torch.Tensor | None

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, d] -> [N, C], any float dtype."""


@dataclass(frozen=True)
class DrawnBlock:
    """A drawn block.

    Fields:
        tokens, columns, probs: as in `BlockDraft`; rows of greedy requests in `probs` may be unwritten.
        confidence: float32 [R, γ] raw logits of the confidence head, None without one.
    """

    tokens: torch.Tensor
    columns: torch.Tensor
    probs: torch.Tensor
    confidence: torch.Tensor | None

    @classmethod
    def buffers(
        cls, most: int, gamma: int, columns: int, device: torch.device | str, confidence: bool = True
    ) -> DrawnBlock:
        """Static memory for blocks of at most `most` requests: 4·most·γ·columns bytes and a few numbers."""
        tokens, drawn = torch.zeros(2, most, gamma, dtype=torch.int64, device=device)
        probs = torch.empty(most, gamma, columns, dtype=torch.float32, device=device)
        return cls(tokens, drawn, probs, torch.zeros(most, gamma, device=device) if confidence else None)

    def first(self, count: int) -> DrawnBlock:
        """Views of the first `count` requests."""
        confidence = None if self.confidence is None else self.confidence[:count]
        return DrawnBlock(self.tokens[:count], self.columns[:count], self.probs[:count], confidence)

    def block(self, support: torch.Tensor | None) -> BlockDraft:
        """The block as `accept` takes it. support: the model's `draft_token_ids`."""
        return BlockDraft(self.tokens, self.columns, self.probs, support)


def draft_block(
    model: DraftModel,
    states: torch.Tensor,
    anchors: torch.Tensor,
    requests: RequestTensors,
    positions: torch.Tensor,
    out: DrawnBlock | None = None,
) -> DrawnBlock:
    """Draw a block of γ tokens per request, left to right, each by its request's rule.

    Args:
        states: [R, γ, d] of the backbone, after its last norm. anchors: int64 [R]. requests: R of them.
        positions: int64 [R], the anchors' own. out: buffers of R requests to write to; None makes new ones.
    Source: DSpark, Eq. 4-7.
    """
    count, gamma, width = states.shape
    base = model.base_logits(states.reshape(count * gamma, width)).view(count, gamma, -1)
    if out is None:
        out = DrawnBlock.buffers(count, gamma, base.shape[2], states.device, model.confidence_head is not None)
    coins = draw_coins(requests.seeds, requests.steps, gamma).draft
    state, previous = None, anchors
    for k in range(gamma):
        logits, state = _logits(model.markov_head, base[:, k], previous, states[:, k], state)
        law = mixed_law(logits, requests, requests.rule, coupled_raw=False, out=out.probs[:, k])
        column = mixed_draw(logits, law, requests.rule, coins, requests.seeds, positions, k, model.draft_token_ids)
        del logits  # a row over the vocabulary per request, before the next position makes its own
        previous = column if model.draft_token_ids is None else model.draft_token_ids[column]
        out.columns[:, k].copy_(column)
        out.tokens[:, k].copy_(previous)
    if model.confidence_head is not None:
        out.confidence.copy_(block_confidence(model, states, anchors, out.tokens))
    return out


def _logits(
    head: nn.Module | None, base: torch.Tensor, previous: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """U_k + B_k, [R, C] (float32 where there is a head), and the head's next state."""
    if head is None:
        return base, None
    bias, state = head.bias(previous, hidden, state)
    return bias.float().add_(base), state
