"""Requests of one rule with their own ragged rows: what a rule of `accept.py` sees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .ragged import RaggedBatch
from .sampling import SamplingRows
from .types import BlockDraft, StepNoise

CHUNK_ENTRIES = 1 << 22  # target probabilities are made for this many (row, token) pairs at a time


@dataclass(frozen=True)
class Group:
    """n requests of one rule, with their own ragged rows.

    logits [m, V]; rows: m parameters; request, column int64 [m] of each row; first int64 [n], the row of each anchor;
    windows int64 [n]; draft: n blocks; noise fields of the n requests.
    """

    logits: torch.Tensor
    rows: SamplingRows
    request: torch.Tensor
    column: torch.Tensor
    first: torch.Tensor
    windows: torch.Tensor
    draft: BlockDraft
    seeds: torch.Tensor
    positions: torch.Tensor
    accept_coins: torch.Tensor | None
    final_coins: torch.Tensor | None

    def row(self, column: torch.Tensor) -> torch.Tensor:
        """Flat row of (request, column), column int64 [n, c] or [c], clamped to the window."""
        return self.first[:, None] + torch.minimum(column, self.windows[:, None])

    @property
    def slots(self) -> torch.Tensor:
        return torch.arange(self.draft.block_size, device=self.windows.device)


def chunks(members: torch.Tensor, batch: RaggedBatch, logits: torch.Tensor) -> Iterator[torch.Tensor]:
    """Split the members so that the rows of one part stay within CHUNK_ENTRIES logits (at least one request each)."""
    most = max(1, CHUNK_ENTRIES // logits.shape[1])
    start, rows = 0, 0
    for i, window in enumerate(batch.windows[members].tolist()):
        if rows and rows + window + 1 > most:
            yield members[start:i]
            start, rows = i, 0
        rows += window + 1
    yield members[start:]


def part(
    logits: torch.Tensor,
    batch: RaggedBatch,
    draft: BlockDraft,
    rows: SamplingRows,
    noise: StepNoise,
    members: torch.Tensor,
) -> Group:
    """The members' own ragged batch. Everybody together takes the batch as it is, neighbours share a slice of the logits,
    others are gathered."""
    if len(members) == batch.requests and len(logits) == int(batch.qo_indptr[-1]):
        return _everybody(logits, batch, draft, rows, noise)
    windows = batch.windows[members]
    ends = torch.cumsum(windows + 1, dim=0)
    starts = ends - windows - 1
    source = batch.qo_indptr[:-1].to(torch.int64)[members] - starts
    local = torch.arange(int(ends[-1]), device=logits.device)
    request = torch.searchsorted(ends, local, right=True)
    index = local + source[request]
    neighbours = bool((source == source[0]).all())
    coins = noise.coins
    return Group(
        logits=logits[int(index[0]) : int(index[-1]) + 1] if neighbours else logits.index_select(0, index),
        rows=rows.expand(members[request]),
        request=request,
        column=local - starts[request],
        first=starts,
        windows=windows,
        draft=draft.select(members),
        seeds=noise.seeds[members],
        positions=noise.positions[members],
        accept_coins=None if coins is None else coins.accept[members],
        final_coins=None if coins is None else coins.final[members],
    )


def _everybody(
    logits: torch.Tensor, batch: RaggedBatch, draft: BlockDraft, rows: SamplingRows, noise: StepNoise
) -> Group:
    """`part` of all requests of a batch without padding: nothing is copied."""
    coins = noise.coins
    return Group(
        logits=logits,
        rows=rows.expand(batch.row_to_request),
        request=batch.row_to_request,
        column=batch.row_to_column,
        first=batch.qo_indptr[:-1].to(torch.int64),
        windows=batch.windows,
        draft=draft,
        seeds=noise.seeds,
        positions=noise.positions,
        accept_coins=None if coins is None else coins.accept,
        final_coins=None if coins is None else coins.final,
    )
