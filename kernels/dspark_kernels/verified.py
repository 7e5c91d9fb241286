"""A verified batch, and the requests of one rule with their own ragged rows: what a rule of `accept.py` sees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .ragged import RaggedBatch
from .types import BlockDraft, Coins, SamplingRows, StepNoise

CHUNK_ENTRIES = 1 << 22  # target probabilities are made for this many (row, token) pairs at a time


@dataclass(frozen=True)
class Verified:
    """What one verify step is judged on.

    Fields:
        logits: the target's, [M, V] of the batch's ragged rows, any float dtype, penalties and grammar masks (-inf)
            already applied; rows past `batch.qo_indptr[-1]` are not read. Never modified.
        batch: how the rows belong to requests. draft: what was drafted (k >= every window).
        rows: sampling parameters of the R requests. noise: the step's, as given to `sample_block`.

    Raises ValueError where these speak of different batches.
    """

    logits: torch.Tensor
    batch: RaggedBatch
    draft: BlockDraft
    rows: SamplingRows
    noise: StepNoise

    def __post_init__(self):
        requests, block = self.draft.tokens.shape
        rules = self.noise.rules
        if self.batch.requests != requests or self.batch.block_size != block or len(rules.rules) != requests:
            raise ValueError("batch, draft and rules speak of different batches")
        if rules.need_coins and self.draft.probs is None:
            raise ValueError(
                "a batch drafted greedily has no q: its requests must follow the greedy or the coupled rule"
            )

    def parts(self, members: torch.Tensor) -> Iterator[tuple[torch.Tensor, Group]]:
        """The members (int64 [n]) a few at a time, so that the rows of a part stay within CHUNK_ENTRIES logits (one
        request at least): (some of the members, their group). Reads the windows on the host."""
        most = max(1, CHUNK_ENTRIES // self.logits.shape[1])
        start, rows = 0, 0
        host = self.batch.windows_host
        windows = self.batch.windows[members].tolist() if host is None else host[members.numpy()].tolist()
        for i, window in enumerate(windows):
            if rows and rows + window + 1 > most:
                yield members[start:i], self._group(members[start:i])
                start, rows = i, 0
            rows += window + 1
        yield members[start:], self._group(members[start:])

    def _group(self, members: torch.Tensor) -> Group:
        batch, noise = self.batch, self.noise
        if len(members) == batch.requests and len(self.logits) == int(batch.qo_indptr[-1]):
            return self._everybody()
        windows = batch.windows[members]
        ends = torch.cumsum(windows + 1, dim=0)
        starts = ends - windows - 1
        local = torch.arange(int(ends[-1]), device=self.logits.device)
        request = torch.searchsorted(ends, local, right=True)
        source = batch.qo_indptr[:-1].to(torch.int64)[members] - starts
        return Group(
            logits=self.logits.index_select(0, local + source[request]),
            rows=self.rows.expand(members[request]),
            request=request,
            column=local - starts[request],
            first=starts,
            windows=windows,
            draft=self.draft.select(members),
            seeds=noise.seeds[members],
            positions=noise.positions[members],
            coins=None if noise.coins is None else noise.coins.select(members),
        )

    def _everybody(self) -> Group:
        """All requests of a batch without padding: nothing is copied."""
        batch, noise = self.batch, self.noise
        return Group(
            logits=self.logits,
            rows=self.rows.expand(batch.row_to_request),
            request=batch.row_to_request,
            column=batch.row_to_column,
            first=batch.qo_indptr[:-1].to(torch.int64),
            windows=batch.windows,
            draft=self.draft,
            seeds=noise.seeds,
            positions=noise.positions,
            coins=noise.coins,
        )


@dataclass(frozen=True)
class Group:
    """n requests of one rule, with their own ragged rows.

    logits [m, V]; rows: m parameters; request, column int64 [m] of each row; first int64 [n], the row of each anchor;
    windows int64 [n]; draft, seeds, positions, coins: of the n requests.
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
    coins: Coins | None

    def row(self, column: torch.Tensor) -> torch.Tensor:
        """Flat row of (request, column), column int64 [n, c] or [c], clamped to the window."""
        return self.first[:, None] + torch.minimum(column, self.windows[:, None])

    @property
    def slots(self) -> torch.Tensor:
        return torch.arange(self.draft.block_size, device=self.windows.device)
