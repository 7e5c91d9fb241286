"""From target logits to committed tokens: the kernels' acceptance, plain steps, and the cap that only truncates."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dspark_kernels.accept import accept
from dspark_kernels.mixed import sample_rows
from dspark_kernels.ragged import RaggedBatch
from dspark_kernels.types import BlockDraft
from dspark_kernels.verified import Verified
from sglang_dspark.step.types import Step


@dataclass
class Committed:
    """What a step emits.

    `lengths` int64 [R] counts committed tokens, bonus included; `tokens` int64 [R, gamma+1] holds them first, zeros after;
    `acceptance` float32 [R, k] is Σ min(p, q) at verified slots (NaN elsewhere); `ceiling` int64 [R] is what the whole
    block would have committed (cap-accept only).
    """

    lengths: torch.Tensor
    tokens: torch.Tensor
    acceptance: torch.Tensor
    ceiling: torch.Tensor | None = None

    @property
    def bonus(self) -> torch.Tensor:
        """The last committed token of each request, int64 [R]: the next step's anchor."""
        return self.tokens.gather(1, (self.lengths - 1).unsqueeze(1)).squeeze(1)


def judge(
    logits: torch.Tensor,
    verified: RaggedBatch,
    judged: RaggedBatch,
    block: BlockDraft,
    step: Step,
    *,
    ceiling: bool = False,
) -> Committed:
    """Accept drafts within their windows.

    Args:
        logits: [M, V] of the rows of `verified`, adjusted. judged: the same block with the windows that count; it is
            `verified` itself except where whole blocks were verified and windows are cut afterwards.
        ceiling: whether to find as well what the whole block would have committed.
    """
    width = step.slots.shape[1]
    if block.block_size == 0:
        tokens = _padded(sample_rows(logits[: step.size], step.rows, step.noise).unsqueeze(1), width)
        return Committed(torch.ones_like(step.anchors), tokens, logits.new_zeros(step.size, 0))
    most = None
    if ceiling:
        most = accept(Verified(logits, verified, block, step.rows, step.noise)).lengths
    if judged is not verified:
        logits = logits[verified.qo_indptr[:-1].long()[judged.row_to_request] + judged.row_to_column]
    result = accept(Verified(logits, judged, block, step.rows, step.noise))
    return Committed(result.lengths, _padded(result.tokens, width), result.acceptance, most)


def _padded(tokens: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(tokens, (0, width - tokens.shape[1]))
