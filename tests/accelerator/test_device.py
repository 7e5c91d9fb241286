"""A cost that was measured on one machine is not taken for another's.

Bug class: "cuda" for every GPU and "cpu" for every CPU, so that a home folder that is shared, or a server started with
other attention or without graphs, plans with another machine's costs.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sglang.srt import runtime_context

from dspark_scheduler import Fingerprint
from sglang_dspark.accelerator import device
from sglang_dspark.step.speculation import state_folder

PRINT = Fingerprint("target", "draft", 7, "", "bfloat16", 1, "sglang 0.5.23")


def described(monkeypatch, name="NVIDIA H100", target="fa3", draft=None, graphs="full", sizes=(1, 2, 4)) -> str:
    graph = SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(backend=graphs, bs=list(sizes))))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(runtime_context, "attention_backends", lambda: ("other", target))
    monkeypatch.setattr(runtime_context, "get_exec", lambda: SimpleNamespace(graph=graph))
    draft_backend = SimpleNamespace(speculative_draft_attention_backend=draft)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: draft_backend)
    return device.describe_device("cuda:0")


OTHERS = [
    {"name": "NVIDIA A100"}, {"target": "dspark_triton"}, {"draft": "flashinfer"}, {"graphs": "disabled"},
    {"sizes": (1, 2, 4, 8)},
]  # fmt: skip


@pytest.mark.parametrize("changed", OTHERS, ids=lambda c: next(iter(c)))
def test_servers_that_step_at_another_pace_have_another_fingerprint(monkeypatch, changed):
    one, other = (replace(PRINT, device=described(monkeypatch, **c)) for c in ({}, changed))
    assert one != other and state_folder(one) != state_folder(other)
    assert replace(PRINT, device=described(monkeypatch)) == one


def test_a_cpu_is_its_name_and_its_threads(monkeypatch, tmp_path):
    told = set()
    for name in ("A", "B"):
        monkeypatch.setattr(device, "CPUINFO", tmp_path / name)
        (tmp_path / name).write_text(f"processor : 0\nmodel name : CPU {name}\n")
        told.add(device.describe_device("cpu"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    assert len(told | {device.describe_device("cpu")}) == 3
