"""The draft's sequential head and its confidence: from a block's states to drafted tokens, left to right."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from dspark_kernels.confidence import block_confidence
from dspark_kernels.markov import sample_block
from dspark_kernels.markov_windows import sample_windows
from dspark_kernels.types import BlockDraft, SamplingRows, StepNoise
from sglang_dspark.step.ranks import Ranks
from sglang_dspark.step.types import empty_block


@dataclass(frozen=True)
class BlockRun:
    """What one forward of the draft gave: `states` [R, n, d] of its block, and, where a captured graph ran the head too, the
    whole block with its confidence, float32 [R, gamma] logits of each head (None: there is no such head)."""

    states: torch.Tensor
    block: BlockDraft | None = None
    confidence: torch.Tensor | None = None
    hidden_confidence: torch.Tensor | None = None


class Drawing(Protocol):
    """What drawing reads of a step over R requests: anchors int64 [R], sampling parameters, noise."""

    @property
    def size(self) -> int: ...
    @property
    def anchors(self) -> torch.Tensor: ...
    @property
    def rows(self) -> SamplingRows: ...
    @property
    def noise(self) -> StepNoise: ...


class Head:
    """Draws blocks from states and says how sure the draft is of them.

    Args:
        model: the draft: its `base_logits`, `markov_head`, confidence heads and `draft_token_ids` are read.
        ranks: the first one's tokens hold.
    """

    def __init__(self, model, ranks: Ranks) -> None:
        self.model, self.ranks = model, ranks

    def sample(self, run: BlockRun, step: Drawing, length: int, windows: np.ndarray | None = None) -> BlockDraft:
        """Draw `length` tokens per request, left to right; a captured block was drawn already, and is whole.

        With `windows` [R] on the host only the slots inside them are drawn; the others hold token 0 and are never verified.
        """
        if run.block is not None:
            return self._agreed(run.block)
        if length == 0:
            return empty_block(step.anchors)
        hidden = run.states[:, :length]
        head, support = self.model.markov_head, self.model.draft_token_ids
        if windows is None or (windows == length).all():
            base = self.model.base_logits(hidden.reshape(-1, hidden.shape[-1])).view(step.size, length, -1)
            block = sample_block(head, base, hidden, step.anchors, step.rows, step.noise, support)
        else:
            block = sample_windows(
                head, self.model.base_logits, hidden, step.anchors, step.rows, step.noise, windows, support
            )
        return self._agreed(block)

    def confidence(self, run: BlockRun, step: Drawing, block: BlockDraft) -> torch.Tensor | None:
        """Logits float32 [R, k] that draft k is accepted given the ones before it; None without a confidence head."""
        if run.block is not None:
            return run.confidence
        if self.model.confidence_head is None:
            return None
        return block_confidence(self.model, run.states, step.anchors, block.tokens)

    def hidden_confidence(self, run: BlockRun) -> torch.Tensor:
        """Logits float32 [R, n] from the states alone: known before any token is drawn."""
        if run.hidden_confidence is not None:
            return run.hidden_confidence
        return states_confidence(self.model, run.states)

    def _agreed(self, block: BlockDraft) -> BlockDraft:
        """The first rank's block on every rank."""
        if self.ranks.alone:
            return block
        return replace(block, tokens=self.ranks.tensor(block.tokens), columns=self.ranks.tensor(block.columns))


def states_confidence(model, states: torch.Tensor) -> torch.Tensor:
    """Logits float32 [R, n] of the draft's confidence that reads the states [R, n, d] alone, its only one or its second."""
    head = model.hidden_confidence_head or model.confidence_head
    return head(states)
