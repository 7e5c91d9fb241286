"""The verifier's accelerator half, as far as a CPU can check it with stand-ins: refusals, graph tiers and padding.

Bug class (facts of SGLang 0.5.23, section 2): a backend that never looks at the ragged layout reads uniform rows, which
is wrong rows or out of bounds as soon as windows differ; the engine consults the flag for graphs only. And padding: a
row that is not live must write to the slot of nobody, and its logits must reach nobody.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.environ import envs

from dspark_kernels.ragged import RaggedBatch
from dspark_scheduler import Plan
from sglang_dspark.settings.config import ConfigError
from sglang_dspark.step import verifier as module
from sglang_dspark.step.verifier import Verifier

GAMMA = 4


def verifier(device: str, reads_layout: bool, tiers: tuple[int, ...] | None = None) -> Verifier:
    backend = SimpleNamespace(supports_ragged_verify_graph=reads_layout)
    graphs = SimpleNamespace(capture_num_tokens=None if tiers is None else list(tiers))
    runner = SimpleNamespace(device=device, attn_backend=backend, decode_cuda_graph_runner=graphs)
    return Verifier(SimpleNamespace(model_runner=runner), GAMMA)


def accelerated(tiers: tuple[int, ...] | None) -> Verifier:
    """A verifier that believes in an accelerator, over tensors of the CPU."""
    made = verifier("cpu", reads_layout=True, tiers=tiers)
    made.on_cpu = False
    return made


def test_a_backend_that_does_not_read_windows_is_refused_at_start(monkeypatch):
    """In every mode: a request's last block is shorter than a whole one."""
    monkeypatch.setattr(module, "capability", lambda: (9, 0))
    with pytest.raises(ConfigError, match="--attention-backend fa3.*--verify-mode off"):
        verifier("cuda", reads_layout=False).check_backend()


@pytest.mark.parametrize(("device", "reads"), [("cuda", True), ("cpu", False)])
def test_a_backend_that_reads_windows_starts(device, reads):
    verifier(device, reads).check_backend()


@pytest.fixture
def switch():
    """The engine's own switch for graphs by rows, set back afterwards."""
    with envs.SGLANG_RAGGED_VERIFY_MODE.override("static"):
        yield envs.SGLANG_RAGGED_VERIFY_MODE


@pytest.mark.parametrize(
    ("device", "reads", "unpadded", "mode"),
    [
        ("cuda", True, False, "compact"),
        ("cuda", False, False, "static"),
        ("cpu", True, False, "static"),
        ("cuda", True, True, "static"),
    ],
)
def test_graphs_are_captured_by_rows_where_the_attention_reads_windows_and_graphs_may_be_padded(
    switch, device, reads, unpadded, mode
):
    """The engine raises for graphs without padding; without the switch its ragged rows never meet a graph."""
    verifier(device, reads).capture_by_rows(SimpleNamespace(disable_cuda_graph_padding=unpadded))
    assert switch.get() == mode


def test_a_backend_without_token_tiers_says_at_start_what_to_use(switch, caplog):
    """Also where the operator had set the engine's own switch: its capture would raise in the engine's words."""
    switch.set("compact")
    verifier("cuda", reads_layout=False).capture_by_rows(SimpleNamespace(disable_cuda_graph_padding=False))
    assert switch.get() == "static" and "dspark_triton" in caplog.text


@pytest.mark.parametrize(("tiers", "whole", "width"), [((5, 10), False, 5), (None, True, 5), (None, False, 6)])
def test_ragged_rows_never_meet_a_graph_of_whole_blocks(tiers, whole, width):
    """The engine takes a graph by requests for any batch whose width is the captured one; the rows do not fit then."""
    assert accelerated(tiers).width_for_graphs(whole=whole) == width


@pytest.mark.parametrize(
    ("tiers", "windows", "padded"),
    [
        ((5, 10, 20), [0, 2, 1], 10),  # the tier above
        ((5, 10, 20), [4, 4], 10),  # whole blocks too: with graphs by rows, a batch without a layout meets none
        ((5, 10, 20), [0] * 5 + [1], 7),  # six requests, and no graph has slots for more than four: eager
        ((5, 10), [4, 4, 0], 11),  # beyond the last tier: eager
        (None, [0, 2, 1], 6),  # no graphs of ragged rows: eager, unpadded
    ],
)
def test_rows_are_padded_to_the_tier_that_holds_them(tiers, windows, padded):
    """The bound is the plan's, which the host knows without asking the device."""
    high = np.full(len(windows), GAMMA)
    plan = Plan(sum(windows), 0.0, 0.0, GAMMA, np.zeros_like(high), high)
    assert accelerated(tiers).tier(plan) == padded


def test_whole_blocks_meet_the_engines_graphs_by_requests_where_there_are_no_others():
    ragged = SimpleNamespace(windows=torch.tensor([4, 4]), rows=10)
    assert accelerated(None).layout(ragged, [], whole=True) is None
    assert accelerated(None).layout(ragged, [], whole=False).verify_lens.tolist() == [5, 5]


def test_on_a_cpu_nobody_reads_the_layout():
    ragged = SimpleNamespace(windows=torch.tensor([0, 2]), rows=4)
    assert verifier("cpu", True).layout(ragged, [], whole=False) is None
    assert verifier("cpu", True).tier(Plan(2, 0.0, 0.0, GAMMA, np.zeros(2, int), np.full(2, GAMMA))) is None


def test_padding_rows_write_to_nobodys_slot_and_their_logits_reach_nobody(monkeypatch):
    """Windows 0 and 2 of 4, 4 rows in a tier of 10: a pad row that named a live column would overwrite its KV."""
    seen = {}

    def init_new(batch, runner, **options):
        seen.update(options, ids=batch.input_ids, slots=batch.out_cache_loc, lens=batch.seq_lens_cpu)
        return SimpleNamespace()

    def forward(batch, forward_batch, is_verify):
        rows = torch.arange(16.0)  # a graph's own buffers may be longer
        output = SimpleNamespace(next_token_logits=rows[:, None].clone(), hidden_states=rows[:, None].clone())
        return SimpleNamespace(logits_output=output, can_run_cuda_graph=True)

    monkeypatch.setattr(module.ForwardBatch, "init_new", init_new)
    made = accelerated((10, 20))
    made.worker.forward_batch_generation = forward
    anchors, tokens = torch.tensor([7, 8]), torch.arange(8).view(2, GAMMA) + 20
    lens, slots = torch.tensor([30, 40]), torch.arange(10).view(2, GAMMA + 1) + 100
    ragged = RaggedBatch.pack(anchors, tokens, torch.tensor([0, 2]), lens, slots, tier=10)
    step = SimpleNamespace(plan=None, prefix_lens_host=lens)
    target = made.forward(SimpleNamespace(), step, ragged, whole=False)
    assert seen["ids"].tolist() == [7, 8, 24, 25] + [0] * 6
    assert seen["slots"].tolist() == [100, 105, 106, 107] + [0] * 6
    assert seen["write_cols"].tolist() == [0, 5, 6, 7] + [-1] * 6
    assert seen["lens"].tolist() == [31, 43]
    assert target.logits.flatten().tolist() == target.features.flatten().tolist() == list(range(10))
    assert ragged.qo_indptr.tolist() == [0, 1, 4], "rows past the last request's belong to nobody"
