"""Triton kernel of `ragged.py`: one program per request writes its rows, one more writes the padding."""

from __future__ import annotations

import torch

from .backend import jit, tl


@jit
def pack_kernel(
    anchor_ptr, token_ptr, window_ptr, prefix_ptr, slot_ptr,
    ids_ptr, position_ptr, out_slot_ptr, request_ptr, column_ptr, indptr_ptr,
    R, K, TIER, pad_slot, token_stride, slot_stride,
    HAS_SLOTS: tl.constexpr, R2: tl.constexpr, K2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of request r start where the windows before it end; nothing is ever written past the tier."""
    r = tl.program_id(0)
    every = tl.arange(0, R2)
    rows = tl.load(window_ptr + every, mask=every < R, other=-1).to(tl.int32) + 1
    start = tl.sum(tl.where(every < r, rows, 0), axis=0)
    tl.store(indptr_ptr + r, start)
    if r < R:
        column = tl.arange(0, K2)
        row = start + column
        live = (column <= tl.load(window_ptr + r).to(tl.int32)) & (column <= K) & (row < TIER)
        drafted = tl.load(token_ptr + r * token_stride + column - 1, mask=live & (column > 0), other=0).to(tl.int64)
        anchor = tl.load(anchor_ptr + r).to(tl.int64)
        tl.store(ids_ptr + row, tl.where(column == 0, anchor, drafted), mask=live)
        tl.store(position_ptr + row, tl.load(prefix_ptr + r).to(tl.int64) + column, mask=live)
        tl.store(request_ptr + row, (column * 0 + r).to(tl.int64), mask=live)
        tl.store(column_ptr + row, column.to(tl.int64), mask=live)
        if HAS_SLOTS:
            slot = tl.load(slot_ptr + r * slot_stride + column, mask=live, other=0).to(tl.int64)
            tl.store(out_slot_ptr + row, slot, mask=live)
    else:
        for first in range(0, TIER, BLOCK):
            row = first + tl.arange(0, BLOCK)
            padding = (row >= start) & (row < TIER)
            zero = (row * 0).to(tl.int64)
            tl.store(ids_ptr + row, zero, mask=padding)
            tl.store(position_ptr + row, zero, mask=padding)
            tl.store(request_ptr + row, zero, mask=padding)
            tl.store(column_ptr + row, zero, mask=padding)
            if HAS_SLOTS:
                tl.store(out_slot_ptr + row, zero + pad_slot, mask=padding)


def pack_triton(
    anchors: torch.Tensor,
    tokens: torch.Tensor,
    windows: torch.Tensor,
    prefix_lens: torch.Tensor,
    slots: torch.Tensor | None,
    tier: int,
    pad_slot: int,
) -> dict[str, torch.Tensor | None]:
    """The fields of a RaggedBatch of `tier` rows, in one launch."""
    requests, block = tokens.shape
    tokens = tokens.contiguous()
    ids, positions, row_slots, request, column = torch.empty(5, tier, dtype=torch.int64, device=tokens.device)
    indptr = torch.empty(requests + 1, dtype=torch.int32, device=tokens.device)
    slots = None if slots is None else slots.contiguous()
    pack_kernel[(requests + 1,)](
        anchors.contiguous(), tokens, windows.contiguous(), prefix_lens.contiguous(),
        ids if slots is None else slots, ids, positions, row_slots, request, column, indptr,
        requests, block, tier, pad_slot, block, block + 1,
        HAS_SLOTS=slots is not None, R2=1 << max(0, requests - 1).bit_length(), K2=1 << block.bit_length(), BLOCK=256,
    )  # fmt: skip
    return {
        "input_ids": ids,
        "positions": positions,
        "out_slots": None if slots is None else row_slots,
        "qo_indptr": indptr,
        "row_to_request": request,
        "row_to_column": column,
    }
