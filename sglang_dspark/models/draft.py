"""DSpark draft models for the engine's model registry: a block of masks, read against the target's features.

Parameter names and shapes are DeepSpec's (`facts` of the format: `sglang_dspark/models/checkpoint.py`). One forward
takes [anchor, mask x (gamma-1)] per request; slot i predicts the token after it. Keys and values of the context are
not computed by the forward: `write_context` puts them into the draft's KV pool, at the target's own slots, from
the target's features (paper, eq. 2-3).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils.hf_transformers_utils import get_rope_config
from torch import nn

from dspark_kernels.confidence import ConfidenceHead
from dspark_kernels.markov import HEADS
from sglang_dspark.models.checkpoint import SHARED_WITH_TARGET, check_finite, tensor_name
from sglang_dspark.models.draft_config import DraftCheckpointError, DraftConfig

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

_FUSED = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


class DraftAttention(nn.Module):
    """Attention of the block to the context and to the whole block itself (no causal mask)."""

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
        theta, scaling = get_rope_config(config)
        self.rotary_emb = get_rope(
            draft.head_dim,
            rotary_dim=draft.head_dim,
            base=theta,
            rope_scaling=scaling,
            max_position=config.max_position_embeddings,
            is_neox_style=True,
        )
        self.attn = RadixAttention(
            self.num_heads,
            self.head_dim,
            self.head_dim**-0.5,
            self.num_kv_heads,
            layer_id=layer_id,
            attn_type=AttentionType.ENCODER_ONLY,
        )

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        q, k = self.rotary_emb(positions, q, k)
        out, _ = self.o_proj(self.attn(q, k, v, forward_batch))
        return out

    def context_kv(self, positions: torch.Tensor, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [N, kv heads, head_dim] of N context rows: the block's own projections, on H_ctx."""
        k, v = F.linear(context, self.qkv_proj.weight[self.q_size :]).split([self.kv_size, self.kv_size], dim=-1)
        k = self._normed(k, self.k_norm)
        _, k = self.rotary_emb(positions, torch.empty_like(k), k)
        shape = (-1, self.num_kv_heads, self.head_dim)
        return k.reshape(shape), v.reshape(shape)

    def _normed(self, x: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
        return x if norm is None else norm(x.reshape(-1, self.head_dim)).view(x.shape)


class DraftMLP(nn.Module):
    def __init__(self, draft: DraftConfig) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(draft.hidden_size, [draft.intermediate_size] * 2, bias=False)
        self.down_proj = RowParallelLinear(draft.intermediate_size, draft.hidden_size, bias=False)
        self.act_fn = SiluAndMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions, hidden, forward_batch)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class DSparkDraft(nn.Module):
    """The draft: backbone, sequential head and confidence heads, sharing the target's embedding and lm_head."""

    def __init__(self, config, quant_config=None, prefix: str = "") -> None:
        super().__init__()
        if quant_config is not None:
            raise DraftCheckpointError("quantised draft weights are not supported; use bf16, fp16 or fp32")
        self.config = config
        self.draft = draft = DraftConfig.from_dict(config.to_dict())
        self.num_stages = draft.num_hidden_layers  # the engine sizes the draft's KV pool by this name
        self.fc = nn.Linear(draft.hidden_size * len(draft.target_layer_ids), draft.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(draft.hidden_size, eps=draft.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config, draft, i) for i in range(draft.num_hidden_layers))
        self.norm = RMSNorm(draft.hidden_size, eps=draft.rms_norm_eps)
        self.markov_head = (
            HEADS[draft.markov_head_type](draft.vocab_size, draft.markov_rank, draft.hidden_size, draft.support_size)
            if draft.markov_rank
            else None
        )
        markov_width = draft.markov_rank if draft.confidence_head_with_markov else 0
        self.confidence_head = ConfidenceHead(draft.hidden_size, markov_width) if draft.enable_confidence_head else None
        self.hidden_confidence_head = (
            ConfidenceHead(draft.hidden_size, 0) if draft.enable_hidden_confidence_head else None
        )
        ids = torch.arange(draft.support_size) if draft.draft_vocab_size else None
        self.register_buffer("draft_token_ids", ids)
        self.embed_tokens: nn.Module | None = None
        self._head_weight: torch.Tensor | None = None

    def share_with_target(self, embed_tokens: nn.Module, lm_head: nn.Module) -> None:
        """Take the target's embedding and the rows of its lm_head that the draft may propose from.

        Raises:
            DraftCheckpointError: the target's embedding has another width, or its lm_head is quantised.
        """
        weight = getattr(lm_head, "weight", None)
        if weight is None or not weight.is_floating_point() or weight.shape[-1] != self.draft.hidden_size:
            raise DraftCheckpointError(
                "the target's lm_head cannot be shared with the draft: it is quantised, or not "
                f"of width hidden_size={self.draft.hidden_size}"
            )
        self.embed_tokens = embed_tokens
        self._head_weight = support_rows(lm_head, self.draft_token_ids)

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """U: [N, d] post-norm block states -> float32 [N, support] logits before the sequential head (eq. 4)."""
        return F.linear(hidden.to(self._head_weight.dtype), self._head_weight).float()

    def project_features(self, features: torch.Tensor) -> torch.Tensor:
        """H_ctx: [N, m*d] target features -> [N, d] (eq. 2)."""
        if self.draft.normalize_features:
            layers = features.view(features.shape[0], -1, self.draft.hidden_size).float()
            features = F.rms_norm(layers, (self.draft.hidden_size,), eps=self.draft.rms_norm_eps).flatten(1)
        return self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))

    def write_context(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, pool) -> None:
        """Write the draft's keys and values of N committed tokens (eq. 3).

        Args: features [N, m*d]; positions int64 [N]; slots int64 [N], the target's own KV slots; the draft's pool.
        """
        context = self.project_features(features)
        for layer in self.layers:
            k, v = layer.self_attn.context_kv(positions, context)
            pool.set_kv_buffer(layer.self_attn.attn, KVWriteLoc(slots, physical=True), k, v)

    @torch.no_grad()
    def forward(self, input_ids, positions, forward_batch, input_embeds=None, **_) -> LogitsProcessorOutput:
        """Block states [rows, d] after the final norm, as `hidden_states`."""
        hidden = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual, forward_batch)
        hidden, _ = self.norm(hidden, residual)
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden)

    def get_input_embeddings(self) -> nn.Module | None:
        return self.embed_tokens

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load DeepSpec tensors by name.

        Raises:
            DraftCheckpointError: a tensor is unknown or not finite, or a promised one never came.
        """
        parameters = dict(self.named_parameters()) | {k: v for k, v in self.named_buffers() if k == "draft_token_ids"}
        loaded = set()
        for stored, tensor in weights:
            name = tensor_name(stored)
            if name in SHARED_WITH_TARGET:
                continue
            target, shard = _fused_name(name)
            if target not in parameters:
                raise DraftCheckpointError(f"draft tensor {stored} is not one that its config.json explains")
            check_finite(f"draft tensor {stored}", tensor)
            parameter = parameters[target]
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            loader(parameter, tensor) if shard is None else loader(parameter, tensor, shard)
            loaded.add(name)
        missing = set(self.draft.expected_tensors()) - loaded
        for name in [n for n in missing if n.endswith("confidence_head.proj.bias")]:
            parameters[name].data.zero_()
            missing.discard(name)
        if missing:
            raise DraftCheckpointError(f"draft checkpoint lacks the tensors {sorted(missing)}")


def _fused_name(name: str) -> tuple[str, str | int | None]:
    for part, (fused, shard) in _FUSED.items():
        if f".{part}." in name and not name.startswith("markov_head."):
            return name.replace(f".{part}.", f".{fused}."), shard
    return name, None


def support_rows(lm_head: nn.Module, token_ids: torch.Tensor | None) -> torch.Tensor:
    """Rows of the target's lm_head that the draft proposes from, whole on every rank: [support, d].

    One rank keeps the target's own tensor when the support is the whole vocabulary, so nothing is copied.
    """
    weight = lm_head.weight.data
    if get_parallel().tp_size > 1:
        from sglang.srt.distributed.communication_op import tensor_model_parallel_all_gather

        weight = tensor_model_parallel_all_gather(weight.contiguous(), dim=0)
    vocab = int(getattr(lm_head, "org_vocab_size", weight.shape[0]))
    return weight[:vocab] if token_ids is None else weight.index_select(0, token_ids.to(weight.device)).contiguous()


class Qwen3DSparkModel(DSparkDraft):
    """Block with per-head norms of queries and keys: the published drafts of Qwen3 targets."""


class LlamaDSparkModel(DSparkDraft):
    """Block without those norms, so that it can start from a Llama target's own layers."""


EntryClass = [Qwen3DSparkModel, LlamaDSparkModel]
