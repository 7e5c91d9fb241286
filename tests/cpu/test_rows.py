"""The compiled RMSNorm, rotary embedding and gated activations of a plain CPU against SGLang's own torch versions.

Bug class: a rounding too many, the residual left out, a head turned by another row's position, columns behind whole
vectors left out. Strength: float32 to 1e-6 of values near 1, half precision to one rounding; sizes with and without a
rest. Leaving out the rest and turning by the row's index were each planted once and each failed here, and so was torch's
own activation (344 wide, three threads) where every row must have the bits that it has alone.
"""

from __future__ import annotations

import pytest
import sglang.srt.utils  # noqa: F401  (makes the platform)
import torch
from sglang.srt.layers.activation import GeluAndMul, SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

from sglang_dspark.cpu.attention import layers as fused
from sglang_dspark.cpu.attention import rows

DTYPES = [(torch.float32, 1e-6), (torch.bfloat16, 2**-6), (torch.float16, 2**-9)]


def normal(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype,tolerance", DTYPES)
@pytest.mark.parametrize("size", [16, 576, 75])
@torch.inference_mode()
def test_a_norm_is_that_of_sglang_with_and_without_a_residual(dtype, tolerance, size):
    norm = RMSNorm(size).to(dtype)
    norm.weight.copy_(normal(size, dtype=dtype, seed=1))
    x, residual = normal(5, 2 * size, dtype=dtype)[:, :size], normal(5, size, dtype=dtype, seed=2)
    torch.testing.assert_close(fused.norm_forward(norm, x), norm.forward_native(x), rtol=tolerance, atol=tolerance)
    (ours, summed), (theirs, their_sum) = fused.norm_forward(norm, x, residual), norm.forward_native(x, residual)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert torch.equal(summed, their_sum)
    assert torch.equal(fused.norm_forward(norm, x[3:4], residual[3:4])[0], ours[3:4])


@pytest.mark.parametrize("dtype,tolerance", DTYPES)
@pytest.mark.parametrize("size,turned", [(64, 64), (32, 32), (40, 20)])
@torch.inference_mode()
def test_a_rotation_is_that_of_sglang_for_every_head_and_position(dtype, tolerance, size, turned):
    rope = RotaryEmbedding(size, turned, 128, 10000, True, dtype)
    qkv = normal(6, 8 * size, dtype=dtype)
    q, k, _ = qkv.split([5 * size, 2 * size, size], dim=1)
    positions = torch.tensor([0, 1, 127, 3, 64, 2])
    ours, theirs = fused.rotary_forward(rope, positions, q, k), rope.forward_native(positions, q, k)
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its, rtol=2 * tolerance, atol=2 * tolerance)
    alone = fused.rotary_forward(rope, positions[2:3], q[2:3], k[2:3])
    assert torch.equal(alone[0], ours[0][2:3]) and torch.equal(alone[1], ours[1][2:3])


@pytest.mark.parametrize("dtype,tolerance", DTYPES)
@pytest.mark.parametrize("size", [16, 344, 75])
@pytest.mark.usefixtures("three_threads")
@torch.inference_mode()
def test_a_gated_activation_is_that_of_sglang_and_no_row_knows_of_the_others(dtype, tolerance, size):
    for layer, forward in ((SiluAndMul(), fused.silu_forward), (GeluAndMul(), fused.gelu_forward)):
        x = 4 * normal(512, 2 * size + 3, dtype=dtype)[:, : 2 * size]
        ours = forward(layer, x)
        torch.testing.assert_close(ours, layer.forward_native(x), rtol=2 * tolerance, atol=2 * tolerance)
        for count in (1, 2, 7, 256):
            assert torch.equal(forward(layer, x[-count:]), ours[-count:]), count


@torch.inference_mode()
def test_a_gated_activation_survives_numbers_of_any_size():
    x = torch.tensor([[0.0, -0.0, 3e38, -3e38, -90.0, float("nan"), *[1.0] * 6]])
    for activation in (rows.SILU, rows.GELU_TANH):
        out = rows.gate(x, activation)[0]
        assert out[:2].tolist() == [0, 0] and out[2] == x[0, 2] and out[5].isnan()
        assert bool((out[3:5].abs() < 1e-6).all())


@torch.inference_mode()
def test_a_position_outside_the_table_is_an_error():
    rope = RotaryEmbedding(16, 16, 8, 10000, True, torch.float32)
    x = normal(2, 16, dtype=torch.float32)
    with pytest.raises(IndexError, match="outside the rotary table"):
        fused.rotary_forward(rope, torch.tensor([1, 8]), x, x)


@torch.inference_mode()
def test_what_the_compiled_versions_do_not_cover_goes_to_sglangs_own(monkeypatch):
    monkeypatch.setattr(fused, "rms_norm", None)
    monkeypatch.setattr(fused, "rotate", None)
    monkeypatch.setattr(fused, "gate", None)
    x = normal(3, 2, 16, dtype=torch.float32)
    assert torch.equal(fused.silu_forward(SiluAndMul(), x), SiluAndMul().forward_native(x))
    with_erf = GeluAndMul(approximate="none")
    assert torch.equal(fused.gelu_forward(with_erf, x[:, 0]), with_erf.forward_native(x[:, 0]))
    norm = RMSNorm(16)
    assert torch.equal(fused.norm_forward(norm, x), norm.forward_native(x))
    pairs = RotaryEmbedding(16, 16, 8, 10000, False, torch.float32)
    q = normal(2, 32, dtype=torch.float32)
    positions = torch.tensor([1, 7])
    for ours, theirs in zip(
        fused.rotary_forward(pairs, positions, q, q), pairs.forward_native(positions, q, q), strict=True
    ):
        assert torch.equal(ours, theirs)


@torch.inference_mode()
def test_layers_of_this_platform_use_them_once_registered(monkeypatch):
    from sglang.kernels.fused_op import BaseFusedOp

    monkeypatch.setattr(BaseFusedOp, "_oot_forward_registry", {})
    fused.register()
    seen = []
    monkeypatch.setattr(fused, "rms_norm", lambda *a: seen.append("norm") or rows.rms_norm(*a))
    monkeypatch.setattr(fused, "rotate", lambda *a: seen.append("rotate") or rows.rotate(*a))
    monkeypatch.setattr(fused, "gate", lambda *a: seen.append("gate") or rows.gate(*a))
    x = normal(2, 16, dtype=torch.float32)
    SiluAndMul()(x), GeluAndMul()(x), RMSNorm(16)(x)
    RotaryEmbedding(16, 16, 8, 10000, True, torch.float32)(torch.tensor([1, 7]), x, x)
    assert seen == ["gate", "gate", "norm", "rotate"]
