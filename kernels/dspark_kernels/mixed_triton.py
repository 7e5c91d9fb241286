"""Triton kernel of `mixed.py`: one program per row draws by that row's own rule."""

from __future__ import annotations

import torch

from .backend import jit, tl
from .gumbel_triton import row_race
from .sampling_triton import block_for, dense_rows, row_argmax, row_draw


@jit
def mixed_kernel(
    logits_ptr, law_ptr, ids_ptr, rule_ptr, uniform_ptr, seed_ptr, position_ptr, out_ptr, C, k, logits_stride, law_stride,
    uniform_stride, HAS_IDS: tl.constexpr, BLOCK: tl.constexpr, RACE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Rule 0: argmax of the logits; rule 3: the seeded race over the law; else its inverse CDF."""
    row = tl.program_id(0)
    rule = tl.load(rule_ptr + row)
    law = law_ptr + row.to(tl.int64) * law_stride
    drawn = 0
    if rule == 0:
        _, drawn = row_argmax(logits_ptr + row.to(tl.int64) * logits_stride, C, BLOCK)
    else:
        if rule == 3:
            position = tl.load(position_ptr + row) + 1 + k
            drawn = row_race(law, ids_ptr, C, tl.load(seed_ptr + row), position, HAS_IDS, RACE_BLOCK)
        else:
            drawn = row_draw(law, C, tl.load(uniform_ptr + row * uniform_stride + k), BLOCK)
    tl.store(out_ptr + row, drawn.to(tl.int64))


def mixed_draw_triton(
    logits: torch.Tensor,
    law: torch.Tensor,
    rule: torch.Tensor,
    uniforms: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    k: int,
    token_ids: torch.Tensor | None,
) -> torch.Tensor:
    """As `mixed.mixed_draw`, in one launch."""
    logits, law, uniforms = dense_rows(logits), dense_rows(law), dense_rows(uniforms)
    count, columns = law.shape
    out = torch.empty(count, dtype=torch.int64, device=law.device)
    mixed_kernel[(count,)](
        logits, law, seeds if token_ids is None else token_ids, rule, uniforms, seeds, positions, out, columns, k,
        logits.stride(0), law.stride(0), uniforms.stride(0), HAS_IDS=token_ids is not None, BLOCK=block_for(columns),
        RACE_BLOCK=min(1024, block_for(columns)), num_warps=8,
    )  # fmt: skip
    return out
