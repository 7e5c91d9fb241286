"""What SGLang captures of target and draft, and that the stand-in for a CUDA graph forgives as little as one.

Bug class: a graph that was captured over an input which no step fills. Text stays right and acceptance falls, so nothing
but a comparison of a replay with the eager forward shows it.
"""

from __future__ import annotations

import pytest
import torch

from tests.accelerator import forwards
from tests.accelerator.graphs import ReadsBack, RecordedGraph


def test_a_replay_reads_what_the_static_buffers_hold_now():
    x, graph = torch.arange(4.0), RecordedGraph()
    out = graph.record(lambda: (x * 2).view(2, 2).sum(0))
    x.fill_(1)
    assert graph.replay() is out and out.tolist() == [4, 4]


def test_a_replay_keeps_the_capture_s_numbers_and_the_tensors_it_was_given():
    """Catches a stand-in that runs Python again: it would take the new number and the new tensor."""
    scene = {"number": 2.0, "tensor": torch.ones(2)}
    graph = RecordedGraph()
    out = graph.record(lambda: scene["tensor"] * scene["number"])
    scene.update(number=5.0, tensor=torch.full((2,), 7.0))
    graph.replay()
    assert out.tolist() == [2, 2]


@pytest.mark.parametrize(
    "read", [lambda t: t.sum().item(), lambda t: t[t > 0], lambda t: t.nonzero(), lambda t: bool(t[0])]
)
def test_a_value_read_back_while_capturing_raises(read):
    with pytest.raises(ReadsBack):
        RecordedGraph().record(lambda: read(torch.ones(2)))


def test_the_drafts_graph_draws_what_its_eager_forward_draws(child):
    error, scale = child(forwards.draft_graph_error)
    assert error < 1e-5 * scale and scale > 0.01


def test_a_host_value_baked_into_the_drafts_graph_is_seen(child):
    error, scale = child(forwards.draft_graph_error, True)
    assert error > 0.1 * scale


@pytest.mark.parametrize(("counts", "taken"), [([5, 5, 5], True), ([1, 4, 2], False)], ids=["whole blocks", "ragged"])
def test_graphs_by_requests_take_whole_blocks_and_leave_ragged_rows_alone(child, counts, taken):
    assert child(forwards.whole_block_graph_takes, counts) is taken
