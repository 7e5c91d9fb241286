"""What one forward's attention must read and write, worked out once per forward and shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class AttentionPlan:
    """The rows and keys of every request of one forward.

    Attributes:
        rows: query rows per request, int64 ``[R]``; all >= 1.
        keys: key length per request, the request's own rows included, int64 ``[R]``; ``keys >= rows``.
        pool_rows: each request's row of ``req_to_token``, int64 ``[R]``.
        first_row: the index of each request's first row in the batch, int64 ``[R]``.
    """

    rows: np.ndarray
    keys: np.ndarray
    pool_rows: np.ndarray
    first_row: np.ndarray

    @classmethod
    def of(cls, rows, keys, pool_rows) -> AttentionPlan:
        """The plan of requests whose rows follow one another in the batch."""
        rows, keys, pool_rows = (np.ascontiguousarray(x, dtype=np.int64) for x in (rows, keys, pool_rows))
        return cls(rows, keys, pool_rows, np.cumsum(rows) - rows)

    def __post_init__(self) -> None:
        if not (self.rows.shape == self.keys.shape == self.pool_rows.shape == self.first_row.shape):
            raise ValueError("rows, keys, pool_rows and first_row must have one entry per request")
        if self.rows.size and (self.rows.min() < 1 or (self.keys < self.rows).any()):
            raise ValueError(f"every request needs rows >= 1 and keys >= rows; rows {self.rows}, keys {self.keys}")

    @property
    def total_rows(self) -> int:
        """Query rows of all requests together."""
        return int(self.rows.sum())

    def in_pieces(self, most: int) -> AttentionPlan:
        """The same rows as pieces of at most `most` rows, each with the keys up to its own last row (causal only)."""
        pieces = -(-self.rows // most)
        request = np.repeat(np.arange(len(self.rows)), pieces)
        start = (np.arange(len(request)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * most
        rows = np.minimum(most, self.rows[request] - start)
        keys = (self.keys - self.rows)[request] + start + rows
        return AttentionPlan(rows, keys, self.pool_rows[request], self.first_row[request] + start)


def plan_forward(forward_batch) -> AttentionPlan:
    """The plan of SGLang's `ForwardBatch` for decode, extend and (uniform or ragged) target verification.

    In a verification ``seq_lens`` are the prefix lengths without the rows; in decode and extend they include them.

    Raises:
        ValueError: rows that do not add up to the batch's tokens.
    """
    lens = forward_batch.seq_lens_cpu if forward_batch.seq_lens_cpu is not None else forward_batch.seq_lens
    keys = lens.numpy().astype(np.int64)
    mode = forward_batch.forward_mode
    if mode.is_decode():
        rows = np.ones_like(keys)
    elif mode.is_target_verify():
        rows = verify_rows(forward_batch, len(keys))
        keys = keys + rows
    else:
        rows = np.asarray(forward_batch.extend_seq_lens_cpu, dtype=np.int64)
    plan = AttentionPlan.of(rows, keys, forward_batch.req_pool_indices.numpy())
    tokens = forward_batch.input_ids if forward_batch.input_ids is not None else forward_batch.positions
    if tokens is not None and plan.total_rows != len(tokens):
        raise ValueError(f"the batch has {len(tokens)} tokens but its requests have {plan.rows.tolist()} rows")
    return plan


def verify_rows(forward_batch, requests: int) -> np.ndarray:
    """Rows per request of a verification: the worker's own list, SGLang's ragged layout, or the uniform width."""
    spec = forward_batch.spec_info
    rows = getattr(spec, "rows_per_request", None)
    if rows is None:
        layout = getattr(spec, "ragged_verify_layout", None)
        if layout is not None:
            rows = layout.verify_lens_cpu or layout.verify_lens.tolist()
        else:
            rows = [spec.draft_token_num] * requests
    return np.asarray(rows, dtype=np.int64)


def is_causal(layer, forward_batch) -> bool:
    """Whether the rows of one request see only themselves and what is before them (a draft block sees all of itself)."""
    from sglang.srt.layers.radix_attention import AttentionType

    if layer.attn_type == AttentionType.ENCODER_ONLY:
        return False
    return getattr(forward_batch.spec_info, "causal", True)
