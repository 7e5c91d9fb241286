"""Attention on a plain CPU: decode, extend, ragged verification and bidirectional draft blocks over SGLang's pool."""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch.nn.functional import scaled_dot_product_attention

from sglang_dspark.cpu.plan import AttentionPlan, is_causal, plan_forward


class CpuAttentionBackend(AttentionBackend):
    """Reads K and V through ``req_to_token``; made once per model runner (target and draft have one each)."""

    needs_cpu_seq_lens = True

    def __init__(self, runner) -> None:
        super().__init__()
        self.pool = runner.token_to_kv_pool
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.plan: AttentionPlan | None = None

    def init_forward_metadata(self, forward_batch) -> None:
        self.plan = None if forward_batch.forward_mode.is_idle() else plan_forward(forward_batch)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def _forward(self, q, k, v, layer, forward_batch, save_kv_cache):
        if save_kv_cache and k is not None:
            self.pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys, values = self.pool.get_kv_buffer(layer.layer_id)
        out = attend_per_request(
            q, keys, values, self.req_to_token, self.plan, layer.scaling, is_causal(layer, forward_batch)
        )
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

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
) -> torch.Tensor:
    """Attention as one gather and one product per request: the plain reference, and the path of long prompts.

    Args:
        q: ``[rows, heads, head size]``; key_pool, value_pool: ``[slots, kv heads, head size]``.
        req_to_token: slots by request and position; scale: of the logits.
        causal: row i of n sees the keys up to its own; else every row sees all keys of its request.

    Returns:
        ``[rows, heads, head size]``.
    """
    out = torch.empty(q.shape[0], q.shape[1], value_pool.shape[2], dtype=q.dtype)
    first = plan.first_row
    for r, (rows, keys, pool_row) in enumerate(zip(plan.rows, plan.keys, plan.pool_rows)):
        slots = req_to_token[pool_row, :keys]
        query = q[first[r] : first[r] + rows].transpose(0, 1)[None]
        key = key_pool[slots].transpose(0, 1)[None]
        value = value_pool[slots].transpose(0, 1)[None]
        mask = None
        if causal and 1 < rows < keys:
            mask = torch.ones(rows, keys, dtype=torch.bool).tril_(int(keys - rows))
        out[first[r] : first[r] + rows] = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=bool(causal and rows == keys), scale=scale,
            enable_gqa=q.shape[1] != key_pool.shape[1],
        )[0].transpose(0, 1)  # fmt: skip
    return out
