"""RaggedGraph without CUDA runs eagerly over the same static buffers. Separates a stale row (left by a larger batch) and a
padding row that is live from a wrong tier, a wrong slice, and an input that silently does not fit.

Strength: the callable writes to a cache by slot and sums over all its rows, so one stale or live padding row changes a
number that is compared exactly. Capture and replay themselves are checked on a GPU by `benchmarks/gpu_check.py`.
"""

from __future__ import annotations

import pytest
import torch

from dspark_kernels import RaggedGraph, RowBuffer


class Recorder:
    """Computes on all rows it is given and keeps what it saw."""

    def __init__(self):
        self.cache = torch.zeros(100)
        self.seen: list[dict[str, torch.Tensor]] = []
        self.addresses: list[tuple[int, ...]] = []

    def __call__(self, ids, slots):
        self.seen.append({"ids": ids.clone(), "slots": slots.clone()})
        self.addresses.append((ids.data_ptr(), slots.data_ptr()))
        self.cache[slots] += 1.0
        return {"double": ids * 2, "pair": torch.stack((ids, slots), dim=1)}


def make(tiers=(4, 8, 16)):
    recorder = Recorder()
    rows = {"ids": RowBuffer(), "slots": RowBuffer(padding=99)}
    return recorder, RaggedGraph(recorder, tiers, rows)


def inputs(n: int) -> dict[str, torch.Tensor]:
    return {"ids": torch.arange(n) + 1, "slots": torch.arange(n) + 10}


@pytest.mark.parametrize(("rows", "tier"), [(1, 4), (4, 4), (5, 8), (16, 16), (17, 17), (40, 40)])
def test_a_batch_runs_at_its_tier_and_comes_back_at_its_own_length(rows, tier):
    recorder, graph = make()
    out = graph(**inputs(rows))
    assert graph.tier_for(rows) == tier == len(recorder.seen[0]["ids"])
    assert torch.equal(out["double"], 2 * (torch.arange(rows) + 1)) and out["pair"].shape == (rows, 2)


def test_a_smaller_batch_after_a_larger_one_runs_no_stale_row():
    recorder, graph = make()
    graph(**inputs(8))
    recorder.cache.zero_()
    graph(**inputs(5))
    assert recorder.seen[1]["ids"].tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    assert recorder.seen[1]["slots"].tolist() == [10, 11, 12, 13, 14, 99, 99, 99]
    assert recorder.cache.nonzero().flatten().tolist() == [10, 11, 12, 13, 14, 99], (
        "padding wrote to its own slot alone"
    )
    graph(**inputs(40))
    graph(**inputs(6))
    assert recorder.seen[3]["ids"].tolist() == [1, 2, 3, 4, 5, 6, 0, 0], "nor one of an eager batch above the tiers"
    assert recorder.addresses[0] == recorder.addresses[1] == recorder.addresses[3], "what a graph has captured stays"


def test_a_result_is_static_memory_only_as_far_as_the_callable_makes_it_so():
    """Eagerly the outputs are fresh; the documented promise is the weaker one (valid until the next call)."""
    _, graph = make()
    first = graph(**inputs(3))["double"].clone()
    graph(**inputs(3) | {"ids": torch.tensor([7, 7, 7])})
    assert first.tolist() == [2, 4, 6]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.zeros(3)}, "ids must be"),
        ({"ids": torch.zeros(3, 1, dtype=torch.int64)}, "ids must be"),
        ({"slots": torch.zeros(4, dtype=torch.int64)}, "disagree"),
        ({"more": torch.zeros(3)}, "exactly"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change, message):
    _, graph = make()
    with pytest.raises(ValueError, match=message):
        graph(**(inputs(3) | change))


def test_a_graph_without_tiers_is_refused_and_without_cuda_takes_no_memory():
    with pytest.raises(ValueError, match="at least one tier"):
        make(tiers=())
    _, graph = make()
    graph.capture_all()
    assert graph.bytes_per_tier == {}
