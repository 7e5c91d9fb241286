"""SGLang's RMSNorm, rotary embedding and gated activations sent to the compiled versions of `rows`.

They come through its table of out-of-tree forwards. What they do not cover (other dtypes or shapes, options that few
models use) goes to SGLang's own torch version.
"""

from __future__ import annotations

import torch

from sglang_dspark.cpu.attention.rows import GELU_TANH, KINDS, SILU, gate, rms_norm, rotate


def register() -> None:
    """Register them for this platform's dispatch key; before the first forward of any layer."""
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.activation import GeluAndMul, SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding

    BaseFusedOp.register_oot_forward(RMSNorm, norm_forward, "native")
    BaseFusedOp.register_oot_forward(SiluAndMul, silu_forward, "native")
    BaseFusedOp.register_oot_forward(GeluAndMul, gelu_forward, "native")
    for kind in (RotaryEmbedding, Llama3RotaryEmbedding):
        BaseFusedOp.register_oot_forward(kind, rotary_forward, "native")


def _rows_of(dtype: torch.dtype, *tensors: torch.Tensor) -> bool:
    return all(t.dim() == 2 and t.dtype == dtype and t.stride(1) == 1 for t in tensors)


def norm_forward(self, x, residual=None, post_residual_addition=None, quant_linear=None):
    """RMSNorm.forward: x ``[rows, size]``, with a residual also the sum."""
    plain = not (self.cast_x_before_out_mul or self.fp32_residual or self.variance_size_override
                 or self.override_orig_dtype or torch.is_grad_enabled())  # fmt: skip
    given = (x,) if residual is None else (x, residual)
    if (plain and post_residual_addition is None and x.dtype in KINDS and self.weight.dtype == x.dtype
            and _rows_of(x.dtype, *given) and x.shape[1] == self.hidden_size):  # fmt: skip
        return rms_norm(x, self.weight, self.variance_epsilon, residual)
    return self.forward_native(x, residual, post_residual_addition, quant_linear)


def rotary_forward(self, positions, query, key, offsets=None, fused_set_kv_buffer_arg=None):
    """RotaryEmbedding.forward: query and key ``[rows, heads * head size]``, turned by their positions."""
    plain = self.is_neox_style and offsets is None and fused_set_kv_buffer_arg is None and not torch.is_grad_enabled()
    if (plain and not hasattr(self, "sin_cos_cache") and positions.dim() == 1 and positions.dtype == torch.int64
            and positions.is_contiguous() and query.dtype in KINDS and _rows_of(query.dtype, query, key)
            and _rows_of(self.cos_sin_cache.dtype, self.cos_sin_cache) and self.cos_sin_cache.is_contiguous()
            and self.cos_sin_cache.dtype in KINDS):  # fmt: skip
        return rotate(positions, query, key, self.cos_sin_cache, self.head_size)
    return self.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)


def silu_forward(self, x):
    """SiluAndMul.forward: x ``[rows, 2 * size]``."""
    return gate(x, SILU) if _gates(x) else self.forward_native(x)


def gelu_forward(self, x):
    """GeluAndMul.forward: x ``[rows, 2 * size]``; the form with erf is SGLang's own."""
    return gate(x, GELU_TANH) if self.approximate == "tanh" and _gates(x) else self.forward_native(x)


def _gates(x) -> bool:
    return x.dtype in KINDS and _rows_of(x.dtype, x) and not torch.is_grad_enabled()
