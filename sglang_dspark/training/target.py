"""The frozen target as the trainer sees it: a batch of slots with their own keys and values, and captured features.

transformers' models run unchanged; only their attention is ours (registered under a name), so that decoding, verifying
a
block and prefilling write into preallocated slots and cost one batched product per layer. On CPUs this is several times
faster than a growing cache with masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION_NAME = "dspark_slots"


@dataclass
class SlotCache:
    """Keys and values of ``B`` sequences: per layer [B, kv_heads, width, head_dim], ``width`` following what is in use.

    A width near the longest sequence keeps each layer's buffer contiguous as it is multiplied: a slice would be copied
    by every product, which cost a fifth of a decoding step.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    capacity: int

    STEP = 64

    @property
    def width(self) -> int:
        return self.keys[0].shape[2]

    def reserve(self, needed: int) -> None:
        """Make ``width`` cover ``needed`` positions, and give back what has become much too wide."""
        if needed > self.capacity:
            raise ValueError(f"position {needed - 1} does not fit a cache of {self.capacity} positions")
        wanted = -(-needed // self.STEP) * self.STEP
        if self.width < wanted or self.width >= wanted + 3 * self.STEP:
            self.keys = [_resized(k, wanted) for k in self.keys]
            self.values = [_resized(v, wanted) for v in self.values]

    def select(self, rows: torch.Tensor) -> SlotCache:
        """A smaller cache that holds ``rows`` [b] int64 only (copies)."""
        return SlotCache([k[rows] for k in self.keys], [v[rows] for v in self.values], self.capacity)


def _resized(buffer: torch.Tensor, width: int) -> torch.Tensor:
    new = buffer.new_zeros(*buffer.shape[:2], width, buffer.shape[3])
    kept = min(width, buffer.shape[2])
    new[:, :, :kept] = buffer[:, :, :kept]
    return new


@dataclass
class SlotView:
    """Where one forward reads and writes. ``rows`` [b] int64 or None for all; ``positions`` [b, n]; ``mask``
    additive.
    """

    cache: SlotCache
    rows: torch.Tensor | None
    positions: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def at(cls, cache: SlotCache, positions: torch.Tensor, rows: torch.Tensor | None = None, keep: int = 0) -> SlotView:
        """``keep``: positions below this one hold tokens of some slot, which the cache must not give back."""
        cache.reserve(max(int(positions.max()) + 1, keep))
        future = torch.arange(cache.width, device=positions.device) > positions[..., None]
        mask = torch.zeros(future.shape, device=positions.device).masked_fill_(future, -1e30)
        return cls(cache, rows, positions, mask[:, None, None])


def slot_attention(module, query, key, value, attention_mask, scaling=None, slots: SlotView | None = None, **_):
    """transformers' attention interface over ``slots``; without slots, plain causal attention (right padding is inert).

    query [b, heads, n, d], key/value [b, kv_heads, n, d] -> ([b, n, heads, d], None).
    """
    b, heads, n, d = query.shape
    kv_heads = key.shape[1]
    scale = scaling if scaling is not None else d**-0.5
    if slots is None:
        groups = heads // kv_heads
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale).transpose(1, 2), None
    keys, values = slots.cache.keys[module.layer_idx], slots.cache.values[module.layer_idx]
    index = torch.arange(b, device=query.device) if slots.rows is None else slots.rows
    keys[index[:, None], :, slots.positions] = key.transpose(1, 2)
    values[index[:, None], :, slots.positions] = value.transpose(1, 2)
    if slots.rows is not None:
        keys, values = keys[slots.rows], values[slots.rows]
    width = keys.shape[2]
    keys, values = keys.view(b * kv_heads, width, d), values.view(b * kv_heads, width, d)
    grouped = query.reshape(b * kv_heads, -1, d)  # [b*kv_heads, groups*n, d]
    scores = torch.bmm(grouped, keys.transpose(1, 2)).float().view(b, kv_heads, heads // kv_heads, n, width)
    weights = torch.softmax(scores.mul_(scale).add_(slots.mask), -1).to(query.dtype)
    out = torch.bmm(weights.view(b * kv_heads, -1, width), values)
    return out.view(b, heads, n, d).transpose(1, 2), None


def check_feature_layers(layers: Sequence[int], target_layers: int) -> None:
    """Raise ValueError for a feature layer that the target lacks, or its last one."""
    for layer in layers:
        if not 0 <= layer < target_layers - 1:
            raise ValueError(
                f"feature layer {layer} is out of range: the target has layers 0..{target_layers - 1}, and the last "
                "one cannot be used (its output is the final hidden state already)"
            )


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, slot_attention)


class Target:
    """A frozen causal language model with feature capture.

    Args:
        path: Hugging Face folder.
        layers: decoder layers whose OUTPUT is captured (0-based), in the order of the fused vector.
        device, dtype: where and how it runs.
    """

    def __init__(
        self, path: str | Path, layers: Sequence[int], device: str = "cpu", dtype: torch.dtype = torch.bfloat16
    ):
        self.path, self.layers, self.device, self.dtype = Path(path), tuple(layers), torch.device(device), dtype
        config = AutoConfig.from_pretrained(path)
        check_feature_layers(self.layers, config.num_hidden_layers)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=ATTENTION_NAME)
        self.model.eval().requires_grad_(False).to(self.device)
        self.config = self.model.config
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self._captured: dict[int, torch.Tensor] = {}
        for layer in self.layers:
            self.model.model.layers[layer].register_forward_hook(self._keep(layer))

    def _keep(self, layer: int):
        def hook(module, args, output):
            self._captured[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    @property
    def stop_ids(self) -> set[int]:
        ids = self.model.generation_config.eos_token_id
        ids = self.config.eos_token_id if ids is None else ids
        return set() if ids is None else set(ids) if isinstance(ids, (list, tuple)) else {ids}

    @property
    def embedding(self) -> torch.Tensor:
        """[V, d]"""
        return self.model.get_input_embeddings().weight

    @property
    def lm_head(self) -> torch.Tensor:
        """[V, d]"""
        return self.model.get_output_embeddings().weight

    def new_cache(self, batch: int, capacity: int) -> SlotCache:
        c = self.config
        d = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        shape = (batch, c.num_key_value_heads, SlotCache.STEP, d)

        def make():
            return torch.zeros(shape, dtype=self.dtype, device=self.device)

        layers = range(c.num_hidden_layers)
        return SlotCache([make() for _ in layers], [make() for _ in layers], capacity)

    @torch.inference_mode()
    def forward(self, ids: torch.Tensor, slots: SlotView | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass over ``ids`` [b, n] int64 -> (features [b, n, m, d], final hidden state after the last norm [b,
        n, d]).
        """
        positions = slots.positions if slots is not None else None
        final = self.model.model(input_ids=ids, position_ids=positions, use_cache=False, slots=slots).last_hidden_state
        features = torch.stack([self._captured[layer] for layer in self.layers], 2)
        self._captured.clear()
        return features, final

    @torch.inference_mode()
    def logits(self, final: torch.Tensor) -> torch.Tensor:
        """float32 logits [..., V] of final hidden states [..., d]."""
        return F.linear(final, self.lm_head).float()


def sample(logits: torch.Tensor, temperature: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """One token per row: logits [b, V] float32, temperature [b] (0 means the argmax) -> [b] int64."""
    greedy = logits.argmax(-1)
    if not bool((temperature > 0).any()):
        return greedy
    probabilities = torch.softmax(logits / temperature.clamp_min(1e-4)[:, None], -1)
    return torch.where(temperature > 0, draw(probabilities, generator), greedy)


def draw(weights: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """One index per row of non-negative ``weights`` [b, V] float32 (any positive sum) -> [b] int64.

    Two levels of sums: a chunk of the vocabulary is drawn, then an index inside it. torch.multinomial costs a third of
    a decoding step at a vocabulary of 49 152, one long cumulative sum a tenth.
    """
    b, size = weights.shape
    chunk = max(1, int(size**0.5))
    padded = F.pad(weights, (0, -size % chunk)).view(b, -1, chunk)
    sums = padded.sum(-1).cumsum(-1)
    u = torch.rand(b, 1, device=weights.device, generator=generator) * sums[:, -1:]
    block = torch.searchsorted(sums, u, right=True).clamp_max_(sums.shape[1] - 1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp_min(0)), 0.0)
    inner = padded[torch.arange(b, device=weights.device), block[:, 0]].cumsum(-1)
    index = torch.searchsorted(inner, u - before, right=True).clamp_max_(chunk - 1)
    return (block * chunk + index).squeeze(1).clamp_max_(size - 1)
