"""The layers of a draft's block: bidirectional attention over the context and the block, a gated product, two norms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils.hf_transformers_utils import get_rope_config
from torch import nn

from sglang_dspark.models.draft_config import DraftConfig

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class DraftAttention(nn.Module):
    """Attention of the block to the context and to the whole block itself (no causal mask)."""

    scaled = True  # logits by 1/sqrt(head_dim)

    def __init__(self, config, draft: DraftConfig, layer_id: int) -> None:
        super().__init__()
        self.head_dim = draft.head_dim
        self.qkv_proj = QKVParallelLinear(
            draft.hidden_size, draft.head_dim, draft.num_attention_heads, draft.num_key_value_heads, bias=False
        )
        self.o_proj = RowParallelLinear(draft.num_attention_heads * draft.head_dim, draft.hidden_size, bias=False)
        ranks = get_parallel().tp_size
        self.num_heads = draft.num_attention_heads // ranks
        self.num_kv_heads = max(1, draft.num_key_value_heads // ranks)
        self.q_size, self.kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        if draft.has_qk_norm:
            self.q_norm = RMSNorm(draft.head_dim, eps=draft.rms_norm_eps)
            self.k_norm = RMSNorm(draft.head_dim, eps=draft.rms_norm_eps)
        else:
            self.q_norm = self.k_norm = None
        self.rotary_emb = self.rotary(config, draft)
        self.attn = RadixAttention(
            self.num_heads,
            self.head_dim,
            self.head_dim**-0.5 if self.scaled else 1.0,
            self.num_kv_heads,
            layer_id=layer_id,
            attn_type=AttentionType.ENCODER_ONLY,
        )

    @staticmethod
    def rotary(config, draft: DraftConfig) -> nn.Module:
        """The rotary embedding of the draft's own config, over the whole head."""
        theta, scaling = get_rope_config(config)
        return get_rope(
            draft.head_dim,
            rotary_dim=draft.head_dim,
            base=theta,
            rope_scaling=scaling,
            max_position=config.max_position_embeddings,
            is_neox_style=getattr(config, "rope_is_neox_style", True),  # false: pairs of neighbours (Liquid's drafts)
        )

    def values(self, v: torch.Tensor) -> torch.Tensor:
        """What is attended over, from the values' projection [N, kv_size]."""
        return v

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        """Attention of the N rows `hidden` [N, d] at `positions` int64 [N] over the context and the whole block: [N, d]."""
        qkv, _ = self.qkv_proj(hidden)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        q, k = self.rotary_emb(positions, q, k)
        out, _ = self.o_proj(self.attn(q, k, self.values(v), forward_batch))
        return out

    def context_kv(self, positions: torch.Tensor, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [N, kv heads, head_dim] of N context rows: the block's own projections, on H_ctx."""
        k, v = F.linear(context, self.qkv_proj.weight[self.q_size :]).split([self.kv_size, self.kv_size], dim=-1)
        k = self._normed(k, self.k_norm)
        _, k = self.rotary_emb(positions, torch.empty_like(k), k)
        shape = (-1, self.num_kv_heads, self.head_dim)
        return k.reshape(shape), self.values(v).reshape(shape)

    def _normed(self, x: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
        return x if norm is None else norm(x.reshape(-1, self.head_dim)).view(x.shape)


class DraftMLP(nn.Module):
    def __init__(self, draft: DraftConfig) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(draft.hidden_size, [draft.intermediate_size] * 2, bias=False)
        self.down_proj = RowParallelLinear(draft.intermediate_size, draft.hidden_size, bias=False)
        self.act_fn = SiluAndMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The gated MLP: [N, d] to [N, d]."""
        gate_up, _ = self.gate_up_proj(x)
        down, _ = self.down_proj(self.act_fn(gate_up))
        return down


class DraftLayer(nn.Module):
    def __init__(self, config, draft: DraftConfig, layer_id: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(draft.hidden_size, eps=draft.rms_norm_eps)
        self.self_attn = DraftAttention(config, draft, layer_id)
        self.post_attention_layernorm = RMSNorm(draft.hidden_size, eps=draft.rms_norm_eps)
        self.mlp = DraftMLP(draft)

    def forward(self, positions, hidden, residual, forward_batch):
        """One layer on [N, d]; gives hidden states and residual, whose sum is its output. `residual` is None at the first."""
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions, hidden, forward_batch)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual
