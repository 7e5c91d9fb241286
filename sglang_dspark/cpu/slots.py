"""Torch versions of the engine's slot bookkeeping, for its Triton kernels that a plain CPU cannot run."""

from __future__ import annotations

import torch

ASSIGN = "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func"


def install() -> None:
    """Replace the engine's kernel launch on this platform; call it while plugins load."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(ASSIGN, assign_slots, HookType.REPLACE)


def assign_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write newly allocated slots into the requests' rows: request r owns columns start[r] to end[r] (exclusive).

    Args:
        req_pool_indices, start_offset, end_offset: int [batch_size]; req_to_token: [rows, columns], written in place.
        out_cache_loc: the slots of all requests, one after the other.
    """
    counts = (end_offset - start_offset).to(torch.int64)
    rows = torch.repeat_interleave(req_pool_indices.to(torch.int64), counts)
    firsts = torch.cumsum(counts, 0) - counts
    columns = torch.arange(len(rows), device=rows.device) - torch.repeat_interleave(firsts - start_offset, counts)
    req_to_token[rows, columns] = out_cache_loc.to(req_to_token.dtype)
