"""The KV pool of a plain CPU writes and moves exactly the slots that it is told.

Bug class: a prefix-valid write that touches a slot behind the prefix, a move that forgets a layer or the values.
"""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_dspark.cpu.pool import CpuKVPool
from tests.cpu.test_attention import World


def test_the_pool_writes_only_the_committed_prefix_of_each_row_of_slots():
    world = World()
    before = world.pool.k_buffer[0].clone()
    loc = torch.tensor([[10, 11, 12], [20, 21, 22]])
    new = world.normal(6, world.pool.head_num, world.head_dim)
    layer = world.layer(layer_id=0)
    world.pool.set_kv_buffer_prefix_valid(layer, loc, torch.tensor([1, 3]), new, new)
    after = world.pool.k_buffer[0]
    written = torch.tensor([10, 20, 21, 22])
    assert torch.equal(after[written], new[torch.tensor([0, 3, 4, 5])])
    changed = (after != before).flatten(1).any(1).nonzero().flatten()
    assert changed.tolist() == written.tolist()


def test_moving_slots_carries_every_layer():
    world = World()
    source, target = torch.tensor([3, 4]), torch.tensor([700, 701])
    expected = [buffer[source].clone() for buffer in (*world.pool.k_buffer, *world.pool.v_buffer)]
    world.pool.move_kv_cache(target, source)
    for buffer, rows in zip((*world.pool.k_buffer, *world.pool.v_buffer), expected, strict=True):
        assert torch.equal(buffer[target], rows)


def test_the_pool_is_one_that_sglang_accepts_in_place_of_its_own():
    assert issubclass(CpuKVPool, MHATokenToKVPool)
