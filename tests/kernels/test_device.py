"""The device half of a step waits for nothing: no number is read back, none is copied to the device, and what is launched
does not depend on what the batch holds.

Bug classes: `.item()`, a Python list or number that becomes a device tensor, a mask index, a path chosen by a value, a
buffer that grows with the batch. Strength: every operation runs with the shapes of a GPU on tensors without numbers, on
the Triton path; planted reads and copies turn it red. What it does not see: the numbers (the interpreter's parity tests).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from dspark_kernels import (
    HEADS,
    AcceptRule,
    ConfidenceHead,
    RaggedBatch,
    RequestRules,
    RequestTensors,
    SamplingRows,
    Verified,
    accept,
    allocate_windows,
    best_tokens,
    calibrated_survival,
    draft_block,
    draw_noise,
    sample_rows,
    step_bytes,
)
from dspark_kernels.backend import HAS_TRITON
from dspark_kernels.types import upload

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed on this machine")

if HAS_TRITON:
    from .device import Device, fake_cuda

RULES = {"mixed": list(AcceptRule), "greedy": [AcceptRule.GREEDY], "seeded": [AcceptRule.COUPLED],
         "block": [AcceptRule.BLOCK]}  # fmt: skip


class Steady:
    """A batch that has not changed since the last step: everything that depends on the requests alone is there already.

    Made within the fake device; what it takes to make it is not counted.
    """

    def __init__(self, requests: int, gamma: int, vocab: int, rules: str = "mixed", tier: int | None = None):
        cuda = torch.device("cuda")
        self.gamma, self.vocab, self.tier = gamma, vocab, tier or requests * (gamma + 1)
        chosen = [RULES[rules][i % len(RULES[rules])] for i in range(requests)]
        number = lambda dtype: torch.empty(requests, dtype=dtype, device=cuda)
        greedy = set(chosen) == {AcceptRule.GREEDY}
        self.rows = SamplingRows(
            number(torch.float32), number(torch.int64), number(torch.float32), number(torch.float32),
            number(torch.bool), greedy, True, True, not greedy,
        )  # fmt: skip
        groups = {rule: torch.empty(chosen.count(rule), dtype=torch.int64, device=cuda) for rule in set(chosen)}
        self.rules = RequestRules(tuple(chosen), groups, number(torch.int32))
        self.seeds, self.steps, self.prefix, self.anchors = (number(torch.int64) for _ in range(4))
        self.low, self.high = number(torch.int64), number(torch.int64)
        self.slots = torch.empty(requests, gamma + 1, dtype=torch.int64, device=cuda)
        self.slope, self.shift = torch.empty(2, 2, gamma, device=cuda)
        self.seconds = torch.empty(requests * gamma + 1, device=cuda)
        self.requests = RequestTensors.of(self.rows, self.rules, self.seeds, self.steps)
        self.model = draft(vocab)

    def draft(self):
        states = torch.empty(len(self.seeds), self.gamma, 64, dtype=torch.bfloat16, device="cuda")
        return draft_block(self.model, states, self.anchors, self.requests, self.prefix)

    def windows(self, drawn, ahead: bool) -> torch.Tensor:
        survival = calibrated_survival(drawn.confidence, self.slope, self.shift, self.requests.greedy)
        budget = best_tokens(survival, self.seconds, self.low, self.high, self.tier - len(self.seeds)) if ahead else 17
        return allocate_windows(survival, budget, self.low, self.high)

    def judge(self, drawn, windows: torch.Tensor):
        noise = draw_noise(self.seeds, self.steps, self.prefix, self.gamma, self.rules)
        batch = RaggedBatch.pack(self.anchors, drawn.tokens, windows, self.prefix, self.slots, tier=self.tier)
        logits = torch.empty(self.tier, self.vocab, dtype=torch.bfloat16, device="cuda")
        result = accept(Verified(logits, batch, drawn.block(None), self.rows, noise))
        return batch, torch.where(batch.kept(result.lengths), batch.out_slots, 0), batch.window_index(self.gamma + 1)

    def step(self, ahead: bool = False):
        drawn = self.draft()
        return self.judge(drawn, self.windows(drawn, ahead))


def draft(vocab: int):
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            head, confidence = HEADS["gated"](vocab, 32, 64), ConfidenceHead(64, 32)
            weight = torch.empty(vocab, 64)
    finally:
        torch.set_default_dtype(usual)
    return SimpleNamespace(
        markov_head=head.requires_grad_(False),
        base_logits=lambda states: states @ weight.t(),
        confidence_head=confidence.requires_grad_(False),
        draft_token_ids=None,
    )


@pytest.mark.parametrize("ahead", [False, True], ids=["causal", "ahead"])
@pytest.mark.parametrize("rules", sorted(RULES))
def test_a_steady_step_reads_nothing_back_and_copies_nothing_to_the_device(rules, ahead, monkeypatch):
    with fake_cuda(monkeypatch) as device:
        steady = Steady(12, 5, 1000, rules)
        device.copies.clear()
        steady.step(ahead)
        assert device.copies == []
        assert "pack_kernel" in device.launches and "windows_kernel" in device.launches
        print(rules, "launches of Triton kernels:", len(device.launches))


def test_the_launches_of_a_draft_do_not_depend_on_what_the_batch_holds(monkeypatch):
    """Nor on the number of requests: one captured graph per size serves them all."""
    seen = {}
    for rules in RULES:
        for requests in (3, 8):
            with monkeypatch.context() as patch, fake_cuda(patch) as device:
                steady = Steady(requests, 5, 1000, rules)
                before = device.operations
                steady.draft()
                seen[rules, requests] = (tuple(device.launches), device.operations - before)
    assert len(set(seen.values())) == 1
    launches, operations = seen["mixed", 3]
    assert launches == ("coins_kernel", *("law_kernel", "mixed_kernel") * 5)
    print("draft of 5 tokens:", len(launches), "Triton kernels,", operations, "operations of torch")


def test_a_plain_step_reads_nothing_back(monkeypatch):
    with fake_cuda(monkeypatch) as device:
        steady = Steady(12, 5, 1000)
        noise = draw_noise(steady.seeds, steady.steps, steady.prefix, 0, steady.rules)
        device.copies.clear()
        tokens = sample_rows(torch.empty(12, 1000, device="cuda"), steady.rows, noise)
        nothing = torch.empty(12, 0, dtype=torch.int64, device="cuda")
        batch = RaggedBatch.pack(
            steady.anchors, nothing, torch.zeros_like(tokens), steady.prefix, steady.slots[:, :1], tier=16
        )
        assert device.copies == [] and tokens.shape == (12,) and batch.rows == 16
        assert device.launches == ["coins_kernel", "law_kernel", "mixed_kernel", "pack_kernel"]


def test_bounds_and_fills_that_are_host_numbers_are_not_copied(monkeypatch):
    with fake_cuda(monkeypatch) as device:
        survival = torch.empty(9, 4, device="cuda")
        allocate_windows(survival, 11, 1, 3)
        allocate_windows(torch.empty(5000, 7, device="cuda"), 11, 1, 3)  # too large for one program
        assert device.copies == []
        steady = Steady(4, 3, 100)
        batch = RaggedBatch.pack(steady.anchors, steady.slots[:, :3], steady.low, steady.prefix, steady.slots, tier=16)
        device.copies.clear()
        batch.scatter(torch.empty(16, 5, device="cuda"), fill=-7.0)
        assert device.copies == []


@pytest.mark.parametrize(
    "plant",
    [
        lambda windows: windows.sum().item(),
        lambda windows: windows.tolist(),
        lambda windows: windows[windows > 0],
        lambda windows: bool((windows > 0).any()),
    ],
    ids=["item", "tolist", "mask index", "bool"],
)
def test_a_planted_read_is_seen(plant, monkeypatch):
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)), fake_cuda(monkeypatch):
        steady = Steady(4, 3, 100)
        drawn = steady.draft()
        plant(steady.windows(drawn, False))


def test_a_planted_copy_is_seen(monkeypatch):
    with fake_cuda(monkeypatch) as device:
        steady = Steady(4, 3, 100)
        device.copies.clear()
        torch.tensor([1, 2, 3, 4], device="cuda")
        torch.empty(4, dtype=torch.int64).to("cuda", non_blocking=True)
        steady.low.cpu()
        assert [copy[1:] for copy in device.copies] == [("cpu", "cuda")] * 2 + [("cuda", "cpu")]


@pytest.mark.parametrize("requests", [1, 64, 256])
def test_the_peak_of_a_step_is_what_a_server_reserves(requests, monkeypatch):
    """At a vocabulary of 151 936, logits of the target included: never more than `step_bytes`, nor far below."""
    gamma, vocab = 7, 151_936
    with fake_cuda(monkeypatch) as device:
        steady = Steady(requests, gamma, vocab, "block")
        before = device.peak = device.live
        steady.step()
        measured = device.peak - before
    reserved = step_bytes(requests, gamma, vocab)
    assert 0.8 * reserved < measured <= reserved, (measured / 2**20, reserved / 2**20)
    print(requests, "requests:", round(measured / 2**20), "MiB of", round(reserved / 2**20))


def test_what_a_changed_batch_uploads_waits_for_nothing(monkeypatch):
    pinned = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: pinned.append(options) or empty(*args, **options))
    with fake_cuda(monkeypatch) as device:
        values = upload(torch.tensor([1, 2, 3]), "cuda")
        assert values.device.type == "cuda" and values.dtype == torch.int64
        assert len(device.copies) == 1 and device.waited == 0 and pinned[-1]["pin_memory"]
        torch.tensor([1, 2, 3]).to("cuda")
        assert device.waited == 1


def test_a_device_that_counts_is_not_fooled(monkeypatch):
    with fake_cuda(monkeypatch) as device:
        kept = torch.empty(1 << 20, device="cuda")
        for _ in range(3):
            torch.empty(1 << 20, device="cuda").add_(1)
        assert device.peak - device.live == device.live == kept.nbytes
    assert isinstance(device, Device)
