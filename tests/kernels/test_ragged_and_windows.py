"""Windows on the device and the flat batch. Separates a different allocation from the host's (ranks or a resumed plan
would disagree) from a layout bug (a row of one request read as another's, padding that writes to a live slot).

Strength: 300 random batches against numpy and against the definition, ties and clashing bounds included; the pad slot is
poisoned and every live slot checked after a simulated cache write.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_kernels import RaggedBatch, allocate_windows, next_tier, ragged, reference
from dspark_scheduler import allocate_windows as allocate_on_host

SETTINGS = settings(max_examples=150, deadline=None, derandomize=True)
KINDS = ["any", "ties", "ones", "zeros"]


@SETTINGS
@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(1, 9), st.sampled_from(KINDS), st.integers(0, 3))
def test_windows_are_the_hosts_and_the_definitions(seed, requests, gamma, kind, bounds):
    g = np.random.default_rng(seed)
    values = {"any": g.random((requests, gamma)), "ties": g.integers(0, 4, (requests, gamma)) / 3}
    survival = {**values, "ones": np.ones((requests, gamma)), "zeros": np.zeros((requests, gamma))}[kind]
    survival = np.cumprod(survival.astype(np.float32), axis=1)
    low = g.integers(0, 4, requests) if bounds & 1 else 0
    high = g.integers(0, gamma + 2, requests) if bounds & 2 else None
    budget = int(g.choice([0, requests * gamma, g.integers(0, requests * gamma + 3)]))
    host = allocate_on_host(survival, budget, min_window=low, max_window=high)
    device = allocate_windows(
        torch.from_numpy(survival),
        budget,
        low if isinstance(low, int) else torch.from_numpy(low),
        None if high is None else torch.from_numpy(high),
    )
    assert device.dtype == torch.int32
    assert device.tolist() == host.tolist()
    least = np.broadcast_to(low, requests).tolist()
    most = np.minimum(gamma if high is None else high, gamma) + np.zeros(requests, int)
    assert device.tolist() == reference.allocate(survival.tolist(), budget, least, most.tolist())


def test_a_budget_may_live_on_the_device():
    survival = torch.rand(5, 4).cumprod(dim=1)
    assert torch.equal(allocate_windows(survival, torch.tensor(7)), allocate_windows(survival, 7))


def test_windows_stay_contiguous_whatever_comes_in():
    windows = allocate_windows(torch.tensor([[0.1, 0.9, 0.9], [torch.nan, 0.5, 0.4]]), 4)
    assert windows.tolist() == [3, 1], "0.1 0.1 0.1 against 0 0 0: the rise and what follows a NaN do not count"


@SETTINGS
@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 8), st.integers(0, 9))
def test_packing_and_reading_back_are_inverse_and_padding_touches_no_live_slot(seed, requests, block, extra):
    g = torch.Generator().manual_seed(seed)
    windows = torch.randint(0, block + 1, (requests,), generator=g)
    total = int((windows + 1).sum())
    anchors, tokens = torch.arange(requests) + 1000, torch.arange(requests * block).view(requests, block)
    prefix = torch.randint(1, 50, (requests,), generator=g)
    slots = torch.randperm(requests * (block + 1), generator=g).view(requests, -1) + 1  # slot 0 is nobody's
    batch = RaggedBatch.pack(anchors, tokens, windows, prefix, slots, tier=total + extra, pad_slot=0)

    assert batch.rows == total + extra and batch.qo_indptr.tolist() == [0, *torch.cumsum(windows + 1, 0).tolist()]
    row = 0
    for r in range(requests):
        for c in range(int(windows[r]) + 1):
            expected = int(anchors[r]) if c == 0 else int(tokens[r, c - 1])
            assert int(batch.input_ids[row]) == expected
            assert int(batch.positions[row]) == int(prefix[r]) + c
            assert int(batch.out_slots[row]) == int(slots[r, c])
            assert (int(batch.row_to_request[row]), int(batch.row_to_column[row])) == (r, c)
            row += 1
    cache = torch.full((requests * (block + 1) + 1,), -1.0)
    written = torch.arange(batch.rows, dtype=torch.float32)
    written[total:] = torch.nan  # what padding computes is poison
    cache[batch.out_slots] = written
    assert not cache[1:].isnan().any()
    verified = slots[torch.arange(block + 1) <= windows[:, None]]
    assert torch.equal(cache[verified], torch.arange(total, dtype=torch.float32))

    assert batch.live.tolist() == [True] * total + [False] * extra
    wide = torch.full((requests * (block + 1),), -1)
    wide[batch.window_index(block + 1)[batch.live]] = torch.arange(total)
    assert torch.equal(wide.view(requests, -1) >= 0, torch.arange(block + 1) <= windows[:, None])
    assert batch.window_index(block + 1)[total:].tolist() == [-1] * extra
    lengths = torch.randint(1, block + 2, (requests,), generator=g).clamp(max=windows + 1)
    assert int(batch.kept(lengths).sum()) == int(lengths.sum())
    assert bool((batch.row_to_column[batch.kept(lengths)] < lengths[batch.row_to_request[batch.kept(lengths)]]).all())

    back = batch.scatter(written, fill=-7.0)
    assert not back.isnan().any()
    for r in range(requests):
        first, w = int(batch.qo_indptr[r]), int(windows[r])
        assert back[r].tolist() == [*range(first, first + w + 1), *[-7.0] * (block - w)]


def test_without_a_tier_nothing_is_padded_and_without_slots_there_are_none():
    batch = RaggedBatch.pack(
        torch.tensor([1, 2]), torch.zeros(2, 3, dtype=torch.int64), torch.tensor([0, 3]), torch.tensor([5, 6])
    )
    assert batch.rows == 5 and batch.out_slots is None and batch.scatter(torch.ones(5, 2)).shape == (2, 4, 2)


def test_a_plain_step_is_packed_as_any_other_only_quicker():
    anchors, prefix, slots = torch.tensor([11, 12, 13]), torch.tensor([5, 6, 9]), torch.tensor([[40], [41], [42]])
    nothing, closed = torch.empty(3, 0, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    quick = RaggedBatch.pack(anchors, nothing, closed, prefix, slots)
    general = RaggedBatch.pack(anchors, nothing, closed, prefix, slots, tier=3)
    for name, value in vars(general).items():
        mine = getattr(quick, name)
        same = torch.equal(mine, value) and mine.dtype == value.dtype if torch.is_tensor(value) else mine == value
        assert same, name


def test_windows_that_the_host_has_are_not_read_from_the_device():
    """`meta` tensors hold no numbers: whoever looks at one raises."""
    windows = np.array([2, 0, 3])
    shapes = (torch.zeros(3, dtype=torch.int64), torch.zeros(3, 3, dtype=torch.int64), torch.from_numpy(windows))
    batch = RaggedBatch.pack(*shapes, torch.zeros(3, dtype=torch.int64), windows_host=windows)
    assert batch.rows == 8 and batch.windows_host is windows
    meta = [x.to("meta") for x in (*shapes, torch.zeros(3, dtype=torch.int64))]
    with pytest.raises(RuntimeError, match="meta"):
        ragged._rows(torch.cumsum(meta[2] + 1, dim=0), None)
    assert ragged._rows(torch.cumsum(meta[2] + 1, dim=0), windows) == 8


def test_what_does_not_fit_is_refused():
    anchors, tokens, prefix = torch.tensor([1, 2]), torch.zeros(2, 3, dtype=torch.int64), torch.tensor([5, 6])
    with pytest.raises(ValueError, match="7 rows do not fit a tier of 6"):
        RaggedBatch.pack(anchors, tokens, torch.tensor([2, 3]), prefix, tier=6)
    with pytest.raises(ValueError, match=r"must lie in \[0, 3\]"):
        RaggedBatch.pack(anchors, tokens, torch.tensor([2, 4]), prefix)
    with pytest.raises(ValueError, match="slots must be"):
        RaggedBatch.pack(anchors, tokens, torch.tensor([2, 3]), prefix, slots=torch.zeros(2, 3))


def test_the_next_tier_holds_the_rows_and_above_the_last_there_is_no_padding():
    assert [next_tier(n, (16, 4, 8)) for n in (1, 4, 5, 16, 17)] == [4, 4, 8, 16, 17]
