"""Attention on a plain CPU against a reference of a few lines: one request, one row, one head at a time.

Bug class: a row that sees a key too many or too few, another request's slots, the wrong kv head, the wrong tile edge.
Strength: keys and values are random, so one wrong key moves a row by about 1/length of its size; lengths go to 200 and
the tolerance is 1e-5 in float32. Shifting the causal limit by one, dropping the last tile and swapping the kv head were
each planted once and each failed here.
"""

from __future__ import annotations

import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_dspark.cpu.attention.backend import PIECE_ROWS, CpuAttentionBackend
from sglang_dspark.cpu.attention.kernel import attention_kernel
from sglang_dspark.cpu.attention.plan import AttentionPlan
from sglang_dspark.cpu.pool import CpuKVPool

SLOTS, REQUESTS, CONTEXT = 1600, 6, 256


def reference(q, keys_pool, values_pool, req_to_token, plan, scale, causal):
    """Softmax(q k / sqrt(d)) v, written out."""
    out = torch.zeros_like(q, dtype=torch.float64)
    group = q.shape[1] // keys_pool.shape[1]
    for rows, keys, pool_row, first in zip(plan.rows, plan.keys, plan.pool_rows, plan.first_row):
        for i in range(rows):
            seen = keys - rows + i + 1 if causal else keys
            slots = req_to_token[pool_row, :seen].long()
            for h in range(q.shape[1]):
                k, v = keys_pool[slots, h // group].double(), values_pool[slots, h // group].double()
                p = torch.softmax(k @ q[first + i, h].double() * scale, 0)
                out[first + i, h] = p @ v
    return out


class World:
    """A pool with random content, a backend over it, and requests with scattered slots."""

    def __init__(self, heads=6, kv_heads=2, head_dim=32, dtype=torch.float32, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.heads, self.head_dim = heads, head_dim
        self.pool = CpuKVPool(
            size=SLOTS,
            page_size=1,
            dtype=dtype,
            head_num=kv_heads,
            head_dim=head_dim,
            layer_num=2,
            device="cpu",
            enable_memory_saver=False,
        )
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.copy_(self.normal(*buffer.shape))
        slots = torch.randperm(SLOTS, generator=self.generator)[: REQUESTS * CONTEXT]
        self.req_to_token = slots.view(REQUESTS, CONTEXT).int().contiguous()
        pools = SimpleNamespace(req_to_token=self.req_to_token)
        self.backend = CpuAttentionBackend(
            SimpleNamespace(token_to_kv_pool=self.pool, req_to_token_pool=pools, model_config=None)
        )

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def layer(self, attn_type=AttentionType.DECODER, layer_id=1):
        return SimpleNamespace(
            layer_id=layer_id,
            tp_q_head_num=self.heads,
            qk_head_dim=self.head_dim,
            v_head_dim=self.head_dim,
            scaling=1 / math.sqrt(self.head_dim),
            attn_type=attn_type,
        )

    def check(self, batch, plan, *, layer=None, causal=True, tolerance=1e-5):
        """Run the backend with new K and V for the batch's rows; compare with the reference over the pool after it."""
        layer = layer or self.layer()
        rows = plan.total_rows
        dtype = self.pool.dtype
        qkv = self.normal(rows, self.heads + 2 * self.pool.head_num, self.head_dim).to(dtype)
        q, k, v = qkv.split([self.heads, self.pool.head_num, self.pool.head_num], dim=1)
        slots = [self.req_to_token[p, n - r : n] for r, n, p in zip(plan.rows, plan.keys, plan.pool_rows, strict=True)]
        batch.out_cache_loc = torch.cat(slots).long()
        batch.positions, batch.input_ids = torch.zeros(rows), torch.zeros(rows)
        batch.req_pool_indices = torch.from_numpy(plan.pool_rows)
        self.backend.init_forward_metadata(batch)
        forward = self.backend.forward_decode if batch.forward_mode.is_decode() else self.backend.forward_extend
        out = forward(q.reshape(rows, -1), k.contiguous(), v.contiguous(), layer, batch)
        keys_pool, values_pool = self.pool.get_kv_buffer(layer.layer_id)
        assert torch.equal(keys_pool[batch.out_cache_loc], k)
        expected = reference(q, keys_pool, values_pool, self.req_to_token, plan, layer.scaling, causal)
        error = float((out.view(expected.shape).double() - expected).abs().max())
        assert error < tolerance, f"off by {error} with rows {plan.rows}, keys {plan.keys}"


def batch_of(mode, seq_lens, **fields):
    lens = torch.tensor(seq_lens)
    defaults = {"spec_info": None, "extend_seq_lens_cpu": None}
    return SimpleNamespace(forward_mode=mode, seq_lens=lens, seq_lens_cpu=lens, **{**defaults, **fields})


def random_lengths(rng, low, high, requests=REQUESTS):
    return rng.integers(low, high, requests), rng.permutation(REQUESTS)[:requests]


@pytest.mark.parametrize("seed", range(6))
def test_decode_sees_every_key_of_its_own_request_and_no_other(seed):
    rng = np.random.default_rng(seed)
    keys, pool_rows = random_lengths(rng, 1, 200, requests=1 + seed)
    World(seed=seed).check(batch_of(ForwardMode.DECODE, keys), AttentionPlan.of(np.ones_like(keys), keys, pool_rows))


@pytest.mark.parametrize("seed", range(6))
def test_extend_is_causal_with_any_prefix_and_any_number_of_rows(seed):
    rng = np.random.default_rng(100 + seed)
    prefix, pool_rows = random_lengths(rng, 0, 60)
    prefix[0] = 0
    rows = rng.integers(1, 3 * PIECE_ROWS, REQUESTS)  # whole requests and requests cut into pieces
    batch = batch_of(ForwardMode.EXTEND, prefix + rows, extend_seq_lens_cpu=rows.tolist())
    World(seed=seed).check(batch, AttentionPlan.of(rows, prefix + rows, pool_rows))


@pytest.mark.parametrize("seed", range(6))
def test_ragged_verification_gives_each_request_its_own_rows_behind_its_prefix(seed):
    rng = np.random.default_rng(200 + seed)
    prefix, pool_rows = random_lengths(rng, 0, 180)
    prefix[-1] = 0
    rows = rng.integers(1, 9, REQUESTS)
    spec = SimpleNamespace(rows_per_request=rows.tolist())
    batch = batch_of(ForwardMode.TARGET_VERIFY, prefix, spec_info=spec)
    World(seed=seed).check(batch, AttentionPlan.of(rows, prefix + rows, pool_rows))


def test_uniform_verification_takes_its_width_from_the_speculative_input():
    prefix, pool_rows = random_lengths(np.random.default_rng(3), 0, 100)
    batch = batch_of(ForwardMode.TARGET_VERIFY, prefix, spec_info=SimpleNamespace(draft_token_num=6))
    World().check(batch, AttentionPlan.of(np.full(REQUESTS, 6), prefix + 6, pool_rows))


def test_sglangs_own_ragged_layout_is_read_like_our_list():
    prefix, pool_rows = random_lengths(np.random.default_rng(4), 1, 100)
    rows = np.array([1, 4, 2, 6, 3, 1])
    layout = SimpleNamespace(verify_lens_cpu=None, verify_lens=torch.from_numpy(rows))
    spec = SimpleNamespace(ragged_verify_layout=layout, draft_token_num=6)
    batch = batch_of(ForwardMode.TARGET_VERIFY, prefix, spec_info=spec)
    World().check(batch, AttentionPlan.of(rows, prefix + rows, pool_rows))


@pytest.mark.parametrize("how", ["layer", "spec_info"])
def test_every_row_of_a_draft_block_sees_the_prefix_and_the_whole_block(how):
    world = World(seed=5)
    prefix, pool_rows = random_lengths(np.random.default_rng(5), 0, 150)
    prefix[0] = 0
    spec = SimpleNamespace(draft_token_num=5)
    layer = world.layer(AttentionType.ENCODER_ONLY) if how == "layer" else None
    if how == "spec_info":
        spec.causal = False
    batch = batch_of(ForwardMode.TARGET_VERIFY, prefix, spec_info=spec)
    world.check(batch, AttentionPlan.of(np.full(REQUESTS, 5), prefix + 5, pool_rows), layer=layer, causal=False)


# 18 leaves a rest behind whole vectors; groups of 1, 3, 8 and 1 leave every rest behind blocks of four rows
@pytest.mark.parametrize("heads,kv_heads,head_dim", [(4, 4, 16), (9, 3, 64), (8, 1, 128), (5, 5, 18)])
def test_every_head_reads_its_own_kv_head_at_every_head_size(heads, kv_heads, head_dim):
    keys, pool_rows = random_lengths(np.random.default_rng(6), 1, 100)
    World(heads, kv_heads, head_dim).check(
        batch_of(ForwardMode.DECODE, keys), AttentionPlan.of(np.ones_like(keys), keys, pool_rows)
    )


@pytest.mark.parametrize("dtype,tolerance", [(torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
@pytest.mark.parametrize("head_dim", [32, 21])
def test_half_precision_is_rounded_once_at_the_end(dtype, tolerance, head_dim):
    keys, pool_rows = random_lengths(np.random.default_rng(7), 100, 200)
    World(head_dim=head_dim, dtype=dtype).check(
        batch_of(ForwardMode.DECODE, keys), AttentionPlan.of(np.ones_like(keys), keys, pool_rows), tolerance=tolerance
    )


def test_very_large_logits_do_not_overflow():
    world = World()
    world.pool.k_buffer[1].mul_(300)
    keys, pool_rows = random_lengths(np.random.default_rng(8), 2, 150)
    # float32 products of size 1e3 are off by 1e-4 and so is the exponent: the tolerance is that, not overflow's NaN
    world.check(
        batch_of(ForwardMode.DECODE, keys), AttentionPlan.of(np.ones_like(keys), keys, pool_rows), tolerance=5e-3
    )


def attend(world, q, rows, keys, pool_rows, threads=1):
    """The compiled kernel's output on so many threads, for rows q ``[rows, heads, head size]`` of a plan."""
    world.backend.paged.set_plan(AttentionPlan.of(rows, keys, pool_rows))
    before, out = torch.get_num_threads(), torch.zeros_like(q)
    try:
        torch.set_num_threads(threads)
        world.backend.paged(q, *world.pool.get_kv_buffer(0), 0.2, True, out)
    finally:
        torch.set_num_threads(before)
    return out


@pytest.mark.parametrize("requests", [1, REQUESTS])
def test_two_threads_give_the_same_bits_as_one(requests):
    keys, pool_rows = random_lengths(np.random.default_rng(9), 1, 200, requests)
    world = World()
    q = world.normal(requests, world.heads, world.head_dim)
    outs = [attend(world, q, np.ones_like(keys), keys, pool_rows, threads) for threads in (1, 2, 3)]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_verified_row_has_the_bits_of_the_same_row_decoded_alone(dtype):
    rng = np.random.default_rng(10)
    world = World(dtype=dtype)
    keys, pool_rows = random_lengths(rng, 20, 200)
    keys[0], keys[1] = 67, 33  # blocks that cross the edge of a tile
    rows = rng.integers(4, 9, REQUESTS)
    q = world.normal(int(rows.sum()), world.heads, world.head_dim).to(dtype)
    together = attend(world, q, rows, keys, pool_rows)
    first = np.cumsum(rows) - rows
    for r in range(REQUESTS):
        for i in range(rows[r]):
            row = slice(first[r] + i, first[r] + i + 1)
            alone = attend(world, q[row], [1], [keys[r] - rows[r] + 1 + i], pool_rows[r : r + 1])
            assert torch.equal(alone, together[row]), (r, i)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most", [1, 7, 32])
def test_a_chunk_in_pieces_of_any_size_has_the_bits_of_the_whole_chunk(dtype, most):
    world = World(dtype=dtype)
    rows, keys, pool_rows = np.array([70, 3, 33]), np.array([130, 3, 40]), np.array([4, 0, 2])
    q = world.normal(int(rows.sum()), world.heads, world.head_dim).to(dtype)
    whole = attend(world, q, rows, keys, pool_rows)
    pieces = AttentionPlan.of(rows, keys, pool_rows).in_pieces(most)
    assert pieces.total_rows == 106 and pieces.rows.max() == most
    out = torch.zeros_like(q)
    world.backend.pieces.set_plan(pieces)
    world.backend.pieces(q, *world.pool.get_kv_buffer(0), 0.2, True, out)
    assert torch.equal(out, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_lies_in_slots_of_others_and_behind_the_last_key_does_not_matter(dtype):
    keys, pool_rows = random_lengths(np.random.default_rng(11), 1, 100)
    world = World(dtype=dtype)
    q = world.normal(REQUESTS, world.heads, world.head_dim).to(dtype)
    before = attend(world, q, np.ones_like(keys), keys, pool_rows)
    own = torch.cat([world.req_to_token[p, :n] for p, n in zip(pool_rows, keys, strict=True)]).long()
    for buffer in world.pool.get_kv_buffer(0):
        kept = buffer[own]
        buffer.fill_(float("nan"))
        buffer[own] = kept
    for p, n in zip(pool_rows, keys, strict=True):
        world.req_to_token[p, n:] = 2**30  # an address that nobody may read
    assert torch.equal(attend(world, q, np.ones_like(keys), keys, pool_rows), before)


def test_a_second_process_finds_the_compiled_kernel_in_the_cache():
    compiled = "kernel._compile(kernel.KINDS[torch.float32], 32, kernel.digest_of_parts())"
    attention_kernel(torch.float32, 32)  # compiled and kept, here or long ago
    script = f"import torch; from sglang_dspark.cpu.attention import kernel; print({compiled}.cache_hits)"
    again = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert again.stdout.split() == ["1"]


def test_rows_that_do_not_add_up_to_the_batch_are_an_error():
    batch = batch_of(ForwardMode.TARGET_VERIFY, [3, 4], spec_info=SimpleNamespace(rows_per_request=[2, 2]))
    batch.input_ids, batch.req_pool_indices = torch.zeros(5), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="5 tokens but its requests have"):
        World().backend.init_forward_metadata(batch)


def test_a_request_without_rows_or_with_fewer_keys_than_rows_is_an_error():
    for rows, keys in (([0], [3]), ([4], [3])):
        with pytest.raises(ValueError, match="rows >= 1 and keys >= rows"):
            AttentionPlan.of(rows, keys, [0])
