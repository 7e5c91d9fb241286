"""What acceptance needs to know of every verified row, a chunk of rows at a time: kernels of `accept_triton.py`.

A chunk starts at `first_row` of the batch; p holds the chunk's laws alone, everything else is the batch's.
"""

from __future__ import annotations

from .backend import jit, tl
from .gumbel_triton import row_race
from .sampling_triton import row_argmax
from .stops_triton import joint_scale


@jit
def row_kernel(
    logits_ptr, p_ptr, rule_ptr, request_ptr, column_ptr, token_ptr, seed_ptr, position_ptr, live_ptr, own_ptr, px_ptr,
    first_row, K, V, logits_stride, HAS_P: tl.constexpr, ARGMAX_BLOCK: tl.constexpr, RACE_BLOCK: tl.constexpr,
):  # fmt: skip
    """The token that the target emits by itself (greedy: argmax; coupled: argmax(log p + g)), or else p(x)."""
    local = tl.program_id(0)
    row = first_row + local
    if row < tl.load(live_ptr):
        request = tl.load(request_ptr + row)
        column = tl.load(column_ptr + row)
        rule = tl.load(rule_ptr + request)
        if rule == 0:
            _, first = row_argmax(logits_ptr + row.to(tl.int64) * logits_stride, V, ARGMAX_BLOCK)
            tl.store(own_ptr + row, first.to(tl.int64))
        if HAS_P:
            p_row = p_ptr + local.to(tl.int64) * V
            if rule == 3:
                position = tl.load(position_ptr + request) + 1 + column
                won = row_race(p_row, p_row, V, tl.load(seed_ptr + request), position, False, RACE_BLOCK)
                tl.store(own_ptr + row, won.to(tl.int64))
            if ((rule == 1) | (rule == 2)) & (column < K):
                tl.store(px_ptr + row, tl.load(p_row + tl.load(token_ptr + request * K + column)))


@jit
def overlap_kernel(
    p_ptr, q_ptr, support_ptr, px_ptr, drafted_ptr, rule_ptr, request_ptr, column_ptr, window_ptr, indptr_ptr, live_ptr,
    plain_ptr, scaled_ptr, first_row, K, V, C, HAS_SUPPORT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Σ min(p, q) and Σ min(s p, q) at the slot of one row, if it is verified by the token or the block rule."""
    local = tl.program_id(0)
    row = first_row + local
    if row < tl.load(live_ptr):
        r = tl.load(request_ptr + row)
        k = tl.load(column_ptr + row)
        rule = tl.load(rule_ptr + r)
        if ((rule == 1) | (rule == 2)) & (k < tl.load(window_ptr + r)):
            q = q_ptr + r * K * C
            first = tl.load(indptr_ptr + r)
            scale = joint_scale(px_ptr + first, drafted_ptr + r * K, q, k.to(tl.int32), C)
            p_row = p_ptr + local.to(tl.int64) * V
            lanes = tl.arange(0, BLOCK)
            plain = tl.zeros([BLOCK], tl.float32)
            scaled = tl.zeros([BLOCK], tl.float32)
            for start in range(0, C, BLOCK):
                c = start + lanes
                token = c.to(tl.int64)
                if HAS_SUPPORT:
                    token = tl.load(support_ptr + c, mask=c < C, other=0)
                law = tl.load(q + k * C + c, mask=c < C, other=0.0)
                p = tl.load(p_row + token, mask=c < C, other=0.0)
                plain += tl.minimum(p, law)
                scaled += tl.minimum(p * scale, law)
            tl.store(plain_ptr + r * K + k, tl.sum(plain, axis=0))
            tl.store(scaled_ptr + r * K + k, tl.sum(scaled, axis=0))
