"""The DSpark draft in plain torch: the golden forward, and what is trained.

DSpark, section 3 (Eq. 2-7), parameter names and shapes as DeepSpec publishes them. One module serves every head and both block
shapes; our additions (restricted vocabulary, normalised features, a hidden-only confidence beside the other) are absent
unless the config asks for them.

    draft = load_draft("draft/", target_embedding, target_lm_head)
    hidden, base = draft.draft_block(features, anchors)            # [n, γ, d], [n, γ, Vd]
    logits = base + draft.markov_head.bias(previous, hidden, state)[0]
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from dspark_kernels.confidence import ConfidenceHead
from dspark_kernels.markov import HEADS
from sglang_dspark.models.draft_config import DraftCheckpointError, DraftConfig, flatten_keys
from sglang_dspark.models.families import TRAINED_ARCHITECTURES


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Queries of a block over [context before its anchor; the block itself], both through the same projections (Eq. 3)."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        c, d = config, config.head_dim
        self.config = config
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * d, c.hidden_size, bias=False)
        if c.has_qk_norm:
            self.q_norm, self.k_norm = RMSNorm(d, c.rms_norm_eps), RMSNorm(d, c.rms_norm_eps)

    def _keys_values(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [..., d] -> keys (normalised, rotated) and values [..., kv_heads, head_dim]."""
        shape = (*x.shape[:-1], self.config.num_key_value_heads, self.config.head_dim)
        keys, values = self.k_proj(x).view(shape), self.v_proj(x).view(shape)
        return rotate(self.k_norm(keys) if self.config.has_qk_norm else keys, cos, sin), values

    def forward(self, block, context, block_rope, context_rope, mask):
        """block [b, A, γ, d]; context [b, n, d]; mask [b, A, n] additive float -> [b, A, γ, d].

        Context and block scores are put side by side by hand, so a block without context (mask all -inf) is still well
        defined: it always sees itself.
        """
        b, blocks, gamma, _ = block.shape
        c, n = self.config, context.shape[1]
        groups = c.num_attention_heads // c.num_key_value_heads
        queries = self.q_proj(block).view(b, blocks, gamma, c.num_attention_heads, c.head_dim)
        queries = rotate(self.q_norm(queries) if c.has_qk_norm else queries, *block_rope) * c.head_dim**-0.5
        queries = queries.view(b, blocks, gamma, c.num_key_value_heads, groups, c.head_dim)
        keys, values = self._keys_values(context, *context_rope)
        own_keys, own_values = self._keys_values(block, *block_rope)
        far = queries.permute(0, 3, 1, 4, 2, 5).reshape(b, c.num_key_value_heads, blocks * groups * gamma, c.head_dim)
        scores = far @ keys.permute(0, 2, 3, 1)
        scores = scores.float().view(b, c.num_key_value_heads, blocks, groups * gamma, n) + mask[:, None, :, None, :]
        near = queries.permute(0, 1, 3, 4, 2, 5).reshape(b, blocks, c.num_key_value_heads, groups * gamma, c.head_dim)
        own = (near @ own_keys.permute(0, 1, 3, 4, 2)).float().permute(0, 2, 1, 3, 4)
        weights = torch.softmax(torch.cat([scores, own], -1), -1).to(block.dtype)
        out = weights[..., :n].reshape(b, c.num_key_value_heads, -1, n) @ values.permute(0, 2, 1, 3)
        out = out.view(b, c.num_key_value_heads, blocks, groups, gamma, c.head_dim)
        own_out = weights[..., n:].permute(0, 2, 1, 3, 4) @ own_values.permute(0, 1, 3, 2, 4)
        own_out = own_out.reshape(b, blocks, c.num_key_value_heads, groups, gamma, c.head_dim).permute(0, 2, 1, 3, 4, 5)
        return self.o_proj(
            (out + own_out).permute(0, 2, 4, 1, 3, 5).reshape(b, blocks, gamma, c.num_attention_heads * c.head_dim)
        )


class MLP(nn.Module):
    def __init__(self, config: DraftConfig):
        super().__init__()
        d, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = nn.Linear(d, inner, bias=False), nn.Linear(d, inner, bias=False)
        self.down_proj = nn.Linear(inner, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: DraftConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, block, context, block_rope, context_rope, mask):
        block = block + self.self_attn(self.input_layernorm(block), context, block_rope, context_rope, mask)
        return block + self.mlp(self.post_attention_layernorm(block))


class TrainableDraft(nn.Module):
    """A draft over a target's embedding [V, d] and lm_head [V, d], which are shared, frozen and not saved.

    ``raw`` is its whole config.json, flat or nested: the target's settings (RoPE among them) with the draft's over them.
    """

    def __init__(self, raw: dict, embedding: torch.Tensor, lm_head: torch.Tensor):
        super().__init__()
        self.raw = flatten_keys(raw)
        self.config = c = DraftConfig.from_dict(raw)
        if c.architecture not in TRAINED_ARCHITECTURES:
            raise DraftCheckpointError(
                f"a draft of architecture {c.architecture} is served, but not trained or measured offline; "
                f"that is for {', '.join(TRAINED_ARCHITECTURES)}"
            )
        for name, weight in (("embedding", embedding), ("lm_head", lm_head)):
            if tuple(weight.shape) != (c.vocab_size, c.hidden_size):
                raise ValueError(
                    f"the {name} is {tuple(weight.shape)}, the draft needs {(c.vocab_size, c.hidden_size)}"
                )
        self.fc = nn.Linear(len(c.target_layer_ids) * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.markov_head = (
            HEADS[c.markov_head_type](c.vocab_size, c.markov_rank, c.hidden_size, c.support_size)
            if c.markov_rank
            else None
        )
        read = c.markov_rank if c.confidence_head_with_markov else 0
        self.confidence_head = ConfidenceHead(c.hidden_size, read) if c.enable_confidence_head else None
        self.hidden_confidence_head = ConfidenceHead(c.hidden_size) if c.enable_hidden_confidence_head else None
        if c.restricted:
            self.register_buffer("draft_token_ids", torch.arange(c.support_size))
        # Plain tensors, not parameters: shared with the target, never trained, never saved.
        self.embedding, self._lm_head, self._rows = embedding.detach(), lm_head.detach(), None

    @property
    def lm_head(self) -> torch.Tensor:
        """The lm_head rows [Vd, d] of the proposable tokens."""
        if self._rows is None:
            self._rows = self._lm_head[self.draft_token_ids] if self.config.restricted else self._lm_head
        return self._rows

    def token_ids(self, index: torch.Tensor) -> torch.Tensor:
        """Target token ids of indices into the draft's own vocabulary."""
        return self.draft_token_ids[index] if self.config.restricted else index

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Context of every draft layer (Eq. 2): the target's features [..., m·d], layers in config order -> [..., d]."""
        c = self.config
        if features.shape[-1] != self.fc.in_features:
            raise ValueError(f"features of {features.shape[-1]} numbers a token; the draft reads {self.fc.in_features}")
        if c.normalize_features:
            split = features.unflatten(-1, (-1, c.hidden_size))
            features = F.rms_norm(split, (c.hidden_size,), None, c.rms_norm_eps).flatten(-2)
        return self.hidden_norm(self.fc(features))

    def blocks(self, context: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states after the final norm [b, A, γ, d] of blocks that start at ``positions``.

        Args: context [b, n, d] from ``fuse``; tokens [b, A] int64, the anchors; positions [b, A] int64, their places.
        A block at position a sees context 0..a-1 and itself; slot i stands at RoPE position a + i (docs/design.md, step).
        """
        c, n = self.config, context.shape[1]
        ids = torch.full((*tokens.shape, c.block_size), c.mask_token_id, device=tokens.device)
        ids[..., 0] = tokens
        x = F.embedding(ids, self.embedding).to(context.dtype)
        where = torch.arange(n, device=context.device)
        slots = positions[..., None] + torch.arange(c.block_size, device=context.device)
        mask = torch.zeros(*positions.shape, n, device=context.device)
        mask.masked_fill_(where >= positions[..., None], float("-inf"))
        block_rope, context_rope = self._rope(slots, context.dtype), self._rope(where, context.dtype)
        for layer in self.layers:
            x = layer(x, context, block_rope, context_rope, mask)
        return self.norm(x)

    def draft_block(
        self, features: torch.Tensor, anchors: torch.Tensor, lengths: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One block for each of ``b`` sequences: what a server computes in one draft step.

        Args: features [b, n, m·d], the target's features of the tokens BEFORE the anchor; anchors [b] int64;
        lengths [b] int64: valid features of each row (default n), which is the anchor's position.
        Returns: hidden [b, γ, d] after the final norm, base logits [b, γ, Vd] (without the sequential head).
        """
        positions = torch.full_like(anchors, features.shape[1]) if lengths is None else lengths
        hidden = self.blocks(self.fuse(features), anchors[:, None], positions[:, None])[:, 0]
        return hidden, self.base_logits(hidden)

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """U_k of Eq. 4: [..., d] -> [..., Vd]."""
        return F.linear(hidden, self.lm_head.to(hidden.dtype))

    def confidence_logits(self, hidden: torch.Tensor, previous: torch.Tensor, kind: str = "main") -> torch.Tensor:
        """Logits of c_k (Eq. 7): hidden [..., d], previous [...] target token ids -> float32 [...].

        ``kind``: "main" is the head every policy but `ahead` uses, "hidden" the extra head that reads no drafted token.
        """
        head = self.hidden_confidence_head if kind == "hidden" else self.confidence_head
        return head(hidden, self.markov_head.markov_w1(previous) if head.reads_tokens else None)

    def _rope(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin [..., 1, head_dim/2] of the target's rotary embedding (default type)."""
        raw, d = self.raw, self.config.head_dim
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(f"rope_type {kind!r} is not supported: the draft knows the default rotary embedding only")
        theta = rope.get("rope_theta") or raw.get("rope_theta") or 10000.0
        frequencies = theta ** -(torch.arange(0, d, 2, device=positions.device, dtype=torch.float32) / d)
        angles = positions[..., None, None].float() * frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in halves: x [..., heads, head_dim], cos and sin [..., 1, head_dim/2]."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def load_draft(
    folder: str | Path,
    embedding: torch.Tensor | None = None,
    lm_head: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> TrainableDraft:
    """Load a DeepSpec-format folder.

    Args: embedding, lm_head [V, d]: the target's; None where the checkpoint carries its own ``embed_tokens.weight`` and
    ``lm_head.weight``. dtype: of all parameters.
    Raises ValueError naming missing, unexpected or misshapen keys.
    """
    raw = json.loads((Path(folder) / "config.json").read_text())
    state: dict[str, torch.Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        state.update(load_file(path))
    embedding = state.pop("embed_tokens.weight", embedding)
    lm_head = state.pop("lm_head.weight", lm_head)
    if embedding is None or lm_head is None:
        raise ValueError(f"{folder} stores no embed_tokens/lm_head: give the target's")
    draft = TrainableDraft(raw, embedding.to(dtype), lm_head.to(dtype))
    if draft.config.restricted and "draft_token_ids" in state:
        state["draft_token_ids"] = state["draft_token_ids"].long()
    try:
        draft.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise ValueError(f"{folder} does not fit its config.json: {error}") from error
    return draft.to(dtype).eval()
