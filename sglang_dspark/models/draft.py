"""DSpark draft models for the engine's model registry: a block of masks, read against the target's features.

Parameter names and shapes are DeepSpec's (`facts` of the format: `sglang_dspark/models/checkpoint.py`). One forward
takes [anchor, mask x (gamma-1)] per request; slot i predicts the token after it. Keys and values of the context are
not computed by the forward: `write_context` puts them into the draft's KV pool, at the target's own slots, from
the target's features (paper, eq. 2-3).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import nn

from dspark_kernels.confidence import ConfidenceHead
from dspark_kernels.markov import HEADS
from sglang_dspark.models.block import DraftLayer
from sglang_dspark.models.checkpoint import SHARED_WITH_TARGET, check_finite, tensor_name
from sglang_dspark.models.draft_config import DraftCheckpointError, DraftConfig

_FUSED = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


class DSparkDraft(nn.Module):
    """The draft: backbone, sequential head and confidence heads, sharing the target's embedding and lm_head."""

    layer_class: type[nn.Module] = DraftLayer

    def __init__(self, config, quant_config=None, prefix: str = "") -> None:
        super().__init__()
        if quant_config is not None:
            raise DraftCheckpointError("quantised draft weights are not supported; use bf16, fp16 or fp32")
        self.config = config
        self.draft = draft = DraftConfig.from_dict(config.to_dict())
        self.num_stages = draft.num_hidden_layers  # the engine sizes the draft's KV pool by this name
        self.fc = nn.Linear(draft.hidden_size * len(draft.target_layer_ids), draft.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(draft.hidden_size, eps=draft.rms_norm_eps)
        self.layers = nn.ModuleList(self.layer_class(config, draft, i) for i in range(draft.num_hidden_layers))
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
        self._head_weight = support_rows(lm_head, self.draft.vocab_size, self.draft_token_ids)

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
    def forward(self, input_ids, positions, forward_batch) -> LogitsProcessorOutput:
        """Block states [rows, d] after the final norm, as `hidden_states`.

        It takes ids and nothing else: for a parameter `input_embeds` the engine would capture a graph that reads an
        embedding buffer, which no step fills.
        """
        hidden, residual = self.forward_embed(input_ids), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual, forward_batch)
        hidden, _ = self.norm(hidden, residual)
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden)

    def forward_embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The engine's own name for it: a model that has it is captured from ids."""
        return self.embed_tokens(input_ids)

    def get_input_embeddings(self) -> nn.Module | None:
        return self.embed_tokens

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load DeepSpec tensors by name.

        Raises:
            DraftCheckpointError: a tensor is unknown or not finite, or a promised one never came.
        """
        promised = self.draft.expected_tensors()
        parameters = dict(self.named_parameters()) | {k: v for k, v in self.named_buffers() if k in promised}
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
            if shard == "k" and self.draft.attention_k_eq_v:
                loader(parameter, tensor, "v")
            loaded.add(name)
        missing = set(promised) - loaded
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


def support_rows(lm_head: nn.Module, vocab_size: int, token_ids: torch.Tensor | None) -> torch.Tensor:
    """Rows of the target's lm_head that the draft proposes from, whole on every rank: [support, d].

    One rank keeps the target's own tensor when the support is the whole vocabulary, so nothing is copied. A head that is
    a plain embedding (Gemma 4 ties them) is whole on every rank already.
    """
    weight = lm_head.weight.data
    if weight.shape[0] < vocab_size:
        from sglang.srt.distributed.communication_op import tensor_model_parallel_all_gather

        weight = tensor_model_parallel_all_gather(weight.contiguous(), dim=0)
    return (
        weight[:vocab_size] if token_ids is None else weight.index_select(0, token_ids.to(weight.device)).contiguous()
    )


class Qwen3DSparkModel(DSparkDraft):
    """Block with per-head norms of queries and keys: the published drafts of Qwen3 targets."""


class LingDSparkModel(Qwen3DSparkModel):
    """The same block under the name that drafts of Ling targets carry."""


class Lfm2DSparkDraftModel(Qwen3DSparkModel):
    """The same block for LFM2 targets; its config asks for a rotation of neighbours."""


class DSparkDraftModel(Qwen3DSparkModel):
    """The same block under the name that other exporters give it."""


class LlamaDSparkModel(DSparkDraft):
    """Block without those norms, so that it can start from a Llama target's own layers."""


EntryClass = [Qwen3DSparkModel, LingDSparkModel, Lfm2DSparkDraftModel, DSparkDraftModel, LlamaDSparkModel]
