"""The KV pool of a plain CPU: SGLang's pool with torch in the three places where it launches Triton kernels."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class CpuKVPool(MHATokenToKVPool):
    """K and V of every layer as ``[slots, kv heads, head size]``, written and moved by torch.

    The dtype is the one that SGLang was given (`--kv-cache-dtype auto`: the model's), so attention reads it as it is.
    """

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None  # the parent compiles and warms a Triton copy kernel here

    def _store_kv_layer(self, layer_idx: int, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor) -> None:
        self.k_buffer[layer_idx].index_copy_(0, loc, cache_k)
        self.v_buffer[layer_idx].index_copy_(0, loc, cache_v)

    def _move_kv_cache_impl(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        for buffer in (*self.k_buffer, *self.v_buffer):
            buffer[tgt_loc] = buffer[src_loc]

    def set_kv_buffer_prefix_valid(
        self,
        layer,
        loc_2d: torch.Tensor,
        commit_lens: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: float | None = None,
        v_scale: float | None = None,
        layer_id_override: int | None = None,
    ) -> None:
        """Write the first ``commit_lens[r]`` of each row of slots; what lies behind them stays as it was.

        Args:
            loc_2d: slots ``[R, W]``; commit_lens: ``[R]``; cache_k, cache_v: ``[R*W, kv heads, head size]``.
        """
        keep = (torch.arange(loc_2d.shape[1]) < commit_lens[:, None]).reshape(-1)
        self.set_kv_buffer(
            layer, loc_2d.reshape(-1)[keep], cache_k[keep], cache_v[keep], k_scale, v_scale, layer_id_override
        )
