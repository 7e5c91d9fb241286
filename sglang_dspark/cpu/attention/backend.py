"""Attention on a plain CPU: decode, extend, ragged verification and bidirectional draft blocks over SGLang's pool."""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch.nn.functional import scaled_dot_product_attention

from sglang_dspark.cpu.attention.kernel import attention_kernel
from sglang_dspark.cpu.attention.paged import PagedAttention
from sglang_dspark.cpu.attention.plan import AttentionPlan, is_causal, plan_forward

# Above this many rows one request's product is large enough for torch's fused attention, which multiplies in bfloat16
# but must gather and repeat first. Chosen between a decode or verify step (a few rows) and a prompt's chunk (hundreds).
LONG_ROWS = 32


class CpuAttentionBackend(AttentionBackend):
    """Reads K and V through ``req_to_token``; made once per model runner (target and draft have one each)."""

    needs_cpu_seq_lens = True

    def __init__(self, runner) -> None:
        super().__init__()
        self.pool = runner.token_to_kv_pool
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.paged = PagedAttention(self.req_to_token)
        attention_kernel(self.pool.dtype, self.pool.head_dim)  # compiled now, not at the first request

    def init_forward_metadata(self, forward_batch) -> None:
        if forward_batch.forward_mode.is_idle():
            return
        plan = plan_forward(forward_batch)
        long = plan.rows > LONG_ROWS
        self.short_plan, self.long_plan = plan.only(~long), plan.only(long)
        self.paged.set_plan(self.short_plan)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def _forward(self, q, k, v, layer, forward_batch, save_kv_cache):
        if save_kv_cache and k is not None:
            self.pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        heads, head_dim = layer.tp_q_head_num, layer.qk_head_dim
        q = q.view(-1, heads, head_dim)
        out = torch.empty(q.shape, dtype=q.dtype)
        keys, values = self.pool.get_kv_buffer(layer.layer_id)
        causal = is_causal(layer, forward_batch)
        if len(self.short_plan.rows):
            self.paged(q, keys, values, layer.scaling, causal, out)
        if len(self.long_plan.rows):
            attend_per_request(q, keys, values, self.req_to_token, self.long_plan, layer.scaling, causal, out)
        return out.view(-1, heads * head_dim)

    def support_triton(self) -> bool:
        return False


def attend_per_request(
    q: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    req_to_token: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    causal: bool,
    out: torch.Tensor,
) -> None:
    """Attention as one gather and one fused product per request: the path of long prompts.

    Args:
        q: ``[rows, heads, head size]``; key_pool, value_pool: ``[slots, kv heads, head size]``.
        req_to_token: slots by request and position; scale: of the logits.
        causal: row i of n sees the keys up to its own; else every row sees all keys of its request.
        out: ``[rows, heads, head size]``; the planned requests' rows are written.
    """
    group = q.shape[1] // key_pool.shape[1]
    for rows, keys, pool_row, first in zip(plan.rows, plan.keys, plan.pool_rows, plan.first_row):
        slots = req_to_token[pool_row, :keys]
        # torch's grouped attention (enable_gqa) is several times slower than repeating the few heads
        key, value = (pool[slots].transpose(0, 1).repeat_interleave(group, 0)[None] for pool in (key_pool, value_pool))
        mask = torch.ones(rows, keys, dtype=torch.bool).tril_(int(keys - rows)) if causal and rows < keys else None
        out[first : first + rows] = scaled_dot_product_attention(
            q[first : first + rows].transpose(0, 1)[None], key, value, attn_mask=mask,
            is_causal=bool(causal and rows == keys), scale=scale,
        )[0].transpose(0, 1)  # fmt: skip
