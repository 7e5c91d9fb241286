"""Packing windows of different lengths into one flat batch, and reading results back.

Request r owns the rows qo_indptr[r] .. qo_indptr[r+1]: its anchor, then w[r] drafts. Rows from qo_indptr[R] to the
tier are padding: they carry token 0 at position 0 and write to `pad_slot` alone. How many rows are live is a number on
the device; nobody reads it back.
Source: docs/design.md (step).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .backend import use_triton


def next_tier(rows: int, tiers: Sequence[int]) -> int:
    """The smallest tier that holds `rows`, or `rows` itself above the last tier (no padding there)."""
    return min((tier for tier in tiers if tier >= rows), default=rows)


@dataclass(frozen=True)
class RaggedBatch:
    """One flat verify batch of M rows (padding included). Build it with `pack`.

    Fields:
        input_ids, positions, row_to_request, row_to_column: int64 [M] (padding: 0, 0, request 0, column 0).
        out_slots: int64 [M] cache slots (padding: pad_slot), or None.
        qo_indptr: int32 [R + 1], the last entry of which counts the live rows; windows: int64 [R].
        block_size: k, the number of drafted tokens.
        windows_host: int [R], the same windows where the host had them, so that nothing reads them back; else None.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_slots: torch.Tensor | None
    qo_indptr: torch.Tensor
    row_to_request: torch.Tensor
    row_to_column: torch.Tensor
    windows: torch.Tensor
    block_size: int
    windows_host: np.ndarray | None = None

    def __post_init__(self):
        if self.qo_indptr.shape[0] != self.windows.shape[0] + 1 or self.qo_indptr.dtype != torch.int32:
            raise ValueError("qo_indptr must be int32 [R + 1]")

    @property
    def requests(self) -> int:
        """R, a host number."""
        return self.windows.shape[0]

    @property
    def rows(self) -> int:
        """Rows of the forward pass, padding included (a host number)."""
        return self.input_ids.shape[0]

    @property
    def live(self) -> torch.Tensor:
        """bool [M]: the rows that belong to a request."""
        return torch.arange(self.rows, device=self.qo_indptr.device) < self.qo_indptr[-1]

    def kept(self, lengths: torch.Tensor) -> torch.Tensor:
        """bool [M]: the rows of committed tokens, where request r committed lengths[r] (int64 [R]), its bonus included.

        These are the anchor and the accepted drafts: the bonus token has no row yet.
        """
        return self.live & (self.row_to_column < lengths[self.row_to_request])

    def window_index(self, width: int) -> torch.Tensor:
        """int64 [M]: the place request * width + column of each row in a matrix of whole blocks; -1 on padding."""
        return torch.where(self.live, self.row_to_request * width + self.row_to_column, -1)

    @classmethod
    def pack(
        cls,
        anchors: torch.Tensor,
        tokens: torch.Tensor,
        windows: torch.Tensor,
        prefix_lens: torch.Tensor,
        slots: torch.Tensor | None = None,
        tier: int | None = None,
        pad_slot: int = 0,
        windows_host: np.ndarray | None = None,
    ) -> RaggedBatch:
        """Pack anchors and the first w drafts of each request.

        Args:
            anchors: int64 [R]; tokens: int64 [R, k]; windows: int [R], 0 <= w <= k.
            prefix_lens: int [R], tokens whose target KV is stored: the position of the anchor.
            slots: int64 [R, k + 1] cache slots of anchor and drafts, or None.
            tier: M, rows of the packed batch, a host number of at least Σ(1 + w): R + budget, or the tier above it. None:
                exactly as many as live, which reads the sum back from the device unless the host has the windows.
            pad_slot: a slot that no request owns, where padding rows may write.
            windows_host: int [R], the windows on the host, if they are known there.
        Raises:
            ValueError: shapes disagree; and, where it can be seen without a sync (CPU tensors), a window outside
                [0, k] or more rows than the tier holds.
        """
        requests, block = tokens.shape
        _check_shapes(anchors, tokens, windows, prefix_lens, slots)
        if tier is not None and requests and use_triton(tokens):
            from .ragged_triton import pack_triton

            fields = pack_triton(anchors, tokens, windows, prefix_lens, slots, tier, pad_slot)
            return cls(**fields, windows=windows.to(torch.int64), block_size=block, windows_host=windows_host)
        windows = windows.to(torch.int64)
        if not windows.is_cuda:
            _check_windows(windows, block, tier)
        if block == 0 and tier is None:
            return cls._of_anchors(anchors, windows, prefix_lens, slots, windows_host)
        ends = torch.cumsum(windows + 1, dim=0)
        total = tier if tier is not None else _rows(ends, windows_host)
        row = torch.arange(total, device=tokens.device)
        request = torch.searchsorted(ends, row, right=True)
        live = request < requests
        request = torch.where(live, request, 0)
        column = torch.where(live, row - (ends - windows - 1)[request], 0)
        flat = request * (block + 1) + column

        def pick(matrix: torch.Tensor, padding: int) -> torch.Tensor:
            return torch.where(live, matrix.reshape(-1)[flat].to(torch.int64), padding)

        return cls(
            input_ids=pick(torch.cat((anchors[:, None], tokens), dim=1), 0),
            positions=torch.where(live, prefix_lens.to(torch.int64)[request] + column, 0),
            out_slots=None if slots is None else pick(slots, pad_slot),
            qo_indptr=torch.nn.functional.pad(ends, (1, 0)).to(torch.int32),
            row_to_request=request,
            row_to_column=column,
            windows=windows,
            block_size=block,
            windows_host=windows_host,
        )

    @classmethod
    def _of_anchors(cls, anchors, windows, prefix_lens, slots, windows_host) -> RaggedBatch:
        """A plain decoding step: one row per request, in a few operations instead of twenty."""
        count = torch.arange(len(anchors) + 1, device=anchors.device)
        return cls(
            input_ids=anchors.to(torch.int64),
            positions=prefix_lens.to(torch.int64),
            out_slots=None if slots is None else slots[:, 0].to(torch.int64),
            qo_indptr=count.to(torch.int32),
            row_to_request=count[:-1],
            row_to_column=torch.zeros_like(windows),
            windows=windows,
            block_size=0,
            windows_host=windows_host,
        )

    def row_index(self) -> torch.Tensor:
        """int64 [R, k + 1]: the flat row of each (request, column); columns past the window repeat its last row."""
        column = torch.arange(self.block_size + 1, device=self.windows.device)
        return self.qo_indptr[:-1, None].to(torch.int64) + torch.minimum(column, self.windows[:, None])

    def scatter(self, rows: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """Flat rows [M, ...] -> [R, k + 1, ...], with `fill` past each window. Padding rows are never read."""
        column = torch.arange(self.block_size + 1, device=self.windows.device)
        inside = (column <= self.windows[:, None]).reshape(self.requests, -1, *[1] * (rows.dim() - 1))
        return rows[self.row_index()].masked_fill_(~inside, fill)


def _rows(ends: torch.Tensor, windows_host: np.ndarray | None) -> int:
    """Σ(1 + w), without reading it back where the host has the windows."""
    if windows_host is not None:
        return int(windows_host.sum()) + len(windows_host)
    return int(ends[-1]) if len(ends) else 0


def _check_shapes(anchors, tokens, windows, prefix_lens, slots) -> None:
    requests, block = tokens.shape
    if anchors.shape != (requests,) or windows.shape != (requests,) or prefix_lens.shape != (requests,):
        raise ValueError(f"anchors, windows and prefix_lens must be [{requests}]")
    if slots is not None and slots.shape != (requests, block + 1):
        raise ValueError(f"slots must be [{requests}, {block + 1}], got {tuple(slots.shape)}")


def _check_windows(windows: torch.Tensor, block: int, tier: int | None) -> None:
    if windows.numel() and (int(windows.min()) < 0 or int(windows.max()) > block):
        raise ValueError(f"windows must lie in [0, {block}]: {windows.tolist()}")
    needed = int(windows.sum()) + windows.numel()
    if tier is not None and needed > tier:
        raise ValueError(f"{needed} rows do not fit a tier of {tier}")
