"""The compiled kernel behind torch tensors: one call per layer for a whole batch."""

from __future__ import annotations

import numpy as np
import torch

from sglang_dspark.cpu.attention.kernel import FIELD, FIELDS, attention_kernel
from sglang_dspark.cpu.attention.openmp import run_on_team
from sglang_dspark.cpu.attention.plan import AttentionPlan


class PagedAttention:
    """Attention of a planned batch over one pool; `set_plan` once per forward, then one call per layer."""

    def __init__(self, req_to_token: torch.Tensor) -> None:
        if req_to_token.dtype != torch.int32 or req_to_token.stride(1) != 1:
            raise ValueError("req_to_token must be int32 with positions side by side")
        self._req_to_token = req_to_token
        self._block = np.zeros(len(FIELDS), np.int64)
        self._address = self._block.ctypes.data
        self._kept: tuple = ()

    def set_plan(self, plan: AttentionPlan) -> None:
        """Give the kernel the addresses of the plan's arrays, which are kept alive until the next plan."""
        arrays = {
            name: np.ascontiguousarray(getattr(plan, name)) for name in ("rows", "keys", "pool_rows", "first_row")
        }
        self._kept = tuple(arrays.values())  # the block holds their addresses only
        self._requests = len(plan.keys)
        self._set(
            req_to_token=self._req_to_token.data_ptr(), req_to_token_stride=self._req_to_token.stride(0),
            **{name: array.ctypes.data for name, array in arrays.items()},
        )  # fmt: skip

    def _set(self, **fields: int) -> None:
        for name, value in fields.items():
            self._block[FIELD[name]] = value

    def __call__(
        self,
        q: torch.Tensor,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        scale: float,
        causal: bool,
        out: torch.Tensor,
    ) -> None:
        """Write the planned requests' rows of `out`.

        Args:
            q: ``[rows, heads, head size]``, which may be a slice of a wider row; out: the same shape, dense.
            key_pool, value_pool: ``[slots, kv heads, head size]``; scale: of the logits.
            causal: row i of a request's n sees the keys up to its own; else every row sees all keys of its request.
        """
        heads, head_dim = q.shape[1], q.shape[2]
        kv_heads, threads = key_pool.shape[1], torch.get_num_threads()
        # A slot's heads lie side by side: read together where there are requests enough to share among the threads.
        item_heads = kv_heads if threads == 1 or self._requests >= 4 * threads else 1
        self._set(
            counter=0, items=self._requests * kv_heads // item_heads, item_heads=item_heads,
            q=q.data_ptr(), out=out.data_ptr(),
            keys_pool=key_pool.data_ptr(), values_pool=value_pool.data_ptr(), kv_heads=kv_heads,
            group=heads // kv_heads, q_stride=q.stride(0), out_stride=out.stride(0),
            key_stride=key_pool.stride(0), value_stride=value_pool.stride(0), causal=causal,
            scale=np.float64(scale).view(np.int64),
        )  # fmt: skip
        run_on_team(attention_kernel(q.dtype, head_dim), self._address, threads)
