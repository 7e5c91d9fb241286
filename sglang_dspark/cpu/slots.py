"""Torch versions of the engine's slot bookkeeping, for its Triton kernels that a plain CPU cannot run."""

from __future__ import annotations

import numpy as np
import torch

from sglang_dspark.contract.hooks import REPLACE, Hook


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
    starts, ends = start_offset.numpy(), end_offset.numpy()  # numpy: each of these few operations costs less there
    counts = (ends - starts).astype(np.int64)
    firsts = np.cumsum(counts) - counts
    columns = np.arange(len(out_cache_loc)) - np.repeat(firsts - starts, counts)
    req_to_token.numpy()[np.repeat(req_pool_indices.numpy(), counts), columns] = out_cache_loc.numpy()


HOOKS = (
    Hook(
        "sglang.srt.mem_cache.allocation:assign_req_to_token_pool_func",
        REPLACE,
        assign_slots,
        ("req_pool_indices", "req_to_token", "start_offset", "end_offset", "out_cache_loc", "batch_size"),
    ),
)
