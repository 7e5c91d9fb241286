"""Attention on a plain CPU: decode, extend, ragged verification and bidirectional draft blocks over SGLang's pool."""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_dspark.cpu.attention.kernel import attention_kernel
from sglang_dspark.cpu.attention.paged import PagedAttention
from sglang_dspark.cpu.attention.plan import is_causal, plan_forward

# A prompt's chunk is cut into pieces of this many rows: they skip the keys that all their rows come before, their scratch
# stays in a core's cache, and one long prompt keeps every thread busy. A row's bits are the same in any piece.
PIECE_ROWS = 32


class CpuAttentionBackend(AttentionBackend):
    """Reads K and V through ``req_to_token``; made once per model runner (target and draft have one each)."""

    needs_cpu_seq_lens = True

    def __init__(self, runner) -> None:
        super().__init__()
        self.pool = runner.token_to_kv_pool
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.paged, self.pieces = PagedAttention(self.req_to_token), PagedAttention(self.req_to_token)
        attention_kernel(self.pool.dtype, self.pool.head_dim)  # compiled now, not at the first request

    def init_forward_metadata(self, forward_batch) -> None:
        """Plan the forward once for all layers; requests of many rows are also cut in pieces."""
        if forward_batch.forward_mode.is_idle():
            return
        plan = plan_forward(forward_batch)
        self.paged.set_plan(plan)
        self.long = plan.rows.max(initial=0) > PIECE_ROWS
        if self.long:
            self.pieces.set_plan(plan.in_pieces(PIECE_ROWS))

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        """The same kernel as for extend: a decode is one row per request."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        """Store k and v, then attend: [N, heads * head_dim]."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def _forward(self, q, k, v, layer, forward_batch, save_kv_cache):
        if save_kv_cache and k is not None:
            self.pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        heads, head_dim = layer.tp_q_head_num, layer.qk_head_dim
        q = q.view(-1, heads, head_dim)
        out = torch.empty(q.shape, dtype=q.dtype)
        keys, values = self.pool.get_kv_buffer(layer.layer_id)
        causal = is_causal(layer, forward_batch)
        paged = self.pieces if self.long and causal else self.paged
        paged(q, keys, values, layer.scaling, causal, out)
        return out.view(-1, heads * head_dim)

    def support_triton(self) -> bool:
        """False: a plain CPU has no Triton."""
        return False
