"""DSpark drafts of Gemma 4 targets, in DeepSpec's format (`Gemma4DSparkModel`).

What differs from the Qwen3 block (`block.py`): a norm before and after both halves of a layer and a scalar behind them;
values are the keys' projection under a norm without gain; logits of attention are not scaled; a quarter of each head is
rotated; embeddings are scaled (by the target's own module); base logits are capped before the sequential head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sglang.srt.layers.activation import GeluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.rotary_embedding import get_rope
from torch import nn

from sglang_dspark.models.block import DraftAttention, DraftMLP
from sglang_dspark.models.draft import DSparkDraft
from sglang_dspark.models.draft_config import DraftCheckpointError, DraftConfig


class Gemma4DraftAttention(DraftAttention):
    scaled = False

    def __init__(self, config, draft: DraftConfig, layer_id: int) -> None:
        super().__init__(config, draft, layer_id)
        self.eps = draft.rms_norm_eps

    @staticmethod
    def rotary(config, draft: DraftConfig) -> nn.Module:
        """Pairs (i, i + head_dim/2) of the first quarter are rotated, at frequencies of the whole head; the rest stays."""
        rope = config.rope_parameters
        return get_rope(
            draft.head_dim,
            rotary_dim=draft.head_dim,
            base=rope["rope_theta"],
            rope_scaling={"rope_type": rope["rope_type"]},
            partial_rotary_factor=rope.get("partial_rotary_factor", 1.0),
            max_position=config.max_position_embeddings,
            is_neox_style=True,
        )

    def values(self, v: torch.Tensor) -> torch.Tensor:
        """Values [N, kv_size] normalised per head, without a weight."""
        return F.rms_norm(v.unflatten(-1, (-1, self.head_dim)), (self.head_dim,), eps=self.eps).flatten(-2)


class Gemma4DraftMLP(DraftMLP):
    def __init__(self, draft: DraftConfig) -> None:
        super().__init__(draft)
        self.act_fn = GeluAndMul(approximate="tanh")


class Gemma4DraftLayer(nn.Module):
    def __init__(self, config, draft: DraftConfig, layer_id: int) -> None:
        super().__init__()
        self.self_attn = Gemma4DraftAttention(config, draft, layer_id)
        self.mlp = Gemma4DraftMLP(draft)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            self.add_module(f"{name}_layernorm", RMSNorm(draft.hidden_size, eps=draft.rms_norm_eps))
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, positions, hidden, forward_batch) -> torch.Tensor:
        """One layer on [N, d] with norms before and after both parts; its output is scaled by `layer_scalar`."""
        attended = self.self_attn(positions, self.input_layernorm(hidden), forward_batch)
        hidden = hidden + self.post_attention_layernorm(attended)
        fed = self.mlp(self.pre_feedforward_layernorm(hidden))
        return (hidden + self.post_feedforward_layernorm(fed)) * self.layer_scalar


class Gemma4DSparkModel(DSparkDraft):
    """The published drafts of Gemma 4 targets."""

    layer_class = Gemma4DraftLayer

    def share_with_target(self, embed_tokens: nn.Module, lm_head: nn.Module) -> None:
        """See `DSparkDraft.share_with_target`.

        Raises:
            DraftCheckpointError: also where the target's embedding is not scaled by sqrt(hidden_size), as Gemma's is.
        """
        scale = getattr(embed_tokens, "embed_scale", 1.0)
        if abs(float(scale) - self.draft.hidden_size**0.5) > 0.01 * self.draft.hidden_size**0.5:
            raise DraftCheckpointError(
                f"the target's embedding is scaled by {float(scale):.3g}, not by sqrt(hidden_size): a Gemma4DSparkModel "
                "needs a Gemma 4 target"
            )
        super().share_with_target(embed_tokens, lm_head)

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits, cap = super().base_logits(hidden), self.draft.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @torch.no_grad()
    def forward(self, input_ids, positions, forward_batch) -> LogitsProcessorOutput:
        hidden = self.forward_embed(input_ids)
        for layer in self.layers:
            hidden = layer(positions, hidden, forward_batch)
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=self.norm(hidden))


EntryClass = [Gemma4DSparkModel]
