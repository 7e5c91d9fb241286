"""The plain-CPU platform's decisions: when it is there, what it fills in, what it refuses, which cores a rank gets.

Bug class: a setting or a model that starts and then computes something else than asked for, or dies with a traceback
an hour later. Strength: each refusal is tested with the value that must hit it and with the default that must not.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark import cpu
from sglang_dspark.cpu.processes import forkserver
from sglang_dspark.cpu.processes.cores import cores_of_rank, replace_bindings
from sglang_dspark.cpu.refusals import (
    ARGUMENTS,
    CpuPlatformError,
    refuse_arguments,
    refuse_layers,
    refuse_model,
    refuse_too_little_memory,
)
from tests.engine.tiny import tiny_target

REFUSED_VALUES = {
    "device": "cuda",
    "dtype": "int8",
    "quantization": "fp8",
    "load_format": "bitsandbytes",
    "kv_cache_dtype": "fp8_e5m2",
    "attention_backend": "triton",
    "prefill_attention_backend": "fa3",
    "decode_attention_backend": "flashinfer",
    "speculative_draft_attention_backend": "triton",
    "sampling_backend": "flashinfer",
    "page_size": 16,
    "speculative_algorithm": "EAGLE",
    "enable_torch_compile": True,
    "enable_deterministic_inference": True,
    "enable_lora": True,
    "lora_paths": ["a"],
    "enable_hierarchical_cache": True,
    "disaggregation_mode": "prefill",
    "pp_size": 2,
    "ep_size": 2,
    "cpu_offload_gb": 4,
    "enable_memory_saver": True,
    "enable_multimodal": True,
    "cuda_graph_backend_decode": "full",
    "cuda_graph_backend_prefill": "breakable",
}


def raw_arguments(**fields):
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path="none", **fields)
    return {field.name: getattr(args, field.name) for field in record_fields(ServerArgs)}


def resolved(path, **fields):
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path=str(path), **fields)
    args.resolve_once()
    return args, resolved_view(args)


def test_what_nobody_asked_for_is_refused_by_no_rule():
    refuse_arguments(raw_arguments())


@pytest.mark.parametrize("rule", ARGUMENTS, ids=lambda rule: rule.field)
def test_each_setting_that_cannot_be_served_is_refused_with_its_flag_and_a_way_out(rule):
    value = REFUSED_VALUES[rule.field]
    with pytest.raises(CpuPlatformError) as refusal:
        refuse_arguments({**raw_arguments(), rule.field: value})
    sentence = str(refusal.value)
    assert sentence.startswith("--" + rule.field.replace("_", "-")) and "\n" not in sentence
    assert isinstance(value, bool | list) or str(value) in sentence


def test_what_the_user_gave_wins_over_the_defaults(tmp_path):
    path = tiny_target(tmp_path)
    _, view = resolved(path, dtype="float32", max_total_tokens=777, max_running_requests=3, chunked_prefill_size=32)
    assert (view.dtype, view.max_total_tokens, view.max_running_requests, view.chunked_prefill_size) == (
        "float32",
        777,
        3,
        32,
    )
    _, view = resolved(path)
    assert (view.dtype, view.device, view.attention_backend) == (cpu.default_dtype(), "cpu", cpu.ATTENTION_BACKEND)
    assert view.disable_overlap_schedule and view.sleep_on_idle and view.sampling_backend == "pytorch"
    assert view.cuda_graph_config.decode.backend == view.cuda_graph_config.prefill.backend == "disabled"


def model(**fields):
    from sglang.srt.configs.model_config import AttentionArch

    plain = {
        "model_path": "some/model",
        "quantization": None,
        "is_multimodal": False,
        "is_encoder_decoder": False,
        "attention_arch": AttentionArch.MHA,
        "is_hybrid_swa": False,
        "sliding_window_size": None,
        "hf_text_config": SimpleNamespace(),
        "hf_config": SimpleNamespace(architectures=["LlamaForCausalLM"]),
    }
    return SimpleNamespace(**{**plain, **fields})


def test_models_that_need_more_than_keys_and_values_are_refused(monkeypatch):
    from sglang.srt.configs import hybrid_arch
    from sglang.srt.configs.model_config import AttentionArch

    monkeypatch.setattr(hybrid_arch, "mambaish_config", lambda config: None)
    refuse_model(model())
    for fields, words in (
        ({"quantization": "awq"}, "quantised"),
        ({"is_multimodal": True}, "text alone"),
        ({"is_encoder_decoder": True}, "text alone"),
        ({"attention_arch": AttentionArch.MLA}, "keys and values"),
        ({"sliding_window_size": 4096}, "sliding window"),
        ({"is_hybrid_swa": True}, "sliding window"),
        ({"hf_text_config": SimpleNamespace(num_local_experts=8)}, "8 experts"),
    ):
        with pytest.raises(CpuPlatformError, match=f"some/model cannot be served on a plain CPU: .*{words}"):
            refuse_model(model(**fields))


def test_a_model_larger_than_free_memory_is_refused_before_it_is_loaded(tmp_path):
    path = str(tiny_target(tmp_path))
    parameters = sum(p.numel() for p in _load(path).parameters())
    refuse_too_little_memory(path, 2, parameters * 2)
    with pytest.raises(CpuPlatformError, match="GiB for its weights"):
        refuse_too_little_memory(path, 2, parameters * 2 - 1)
    refuse_too_little_memory("a/hub-name", 2, 0)  # not on this machine yet: nothing to measure


def _load(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path)


def test_a_layer_that_attention_here_does_not_do_is_refused_after_loading():
    from sglang.srt.layers.radix_attention import RadixAttention

    def holder(**fields):
        module = torch.nn.Module()
        module.attn = RadixAttention(4, 16, 0.25, 2, 0, **fields)
        return module

    refuse_layers(holder())
    for fields in ({"sliding_window_size": 128}, {"logit_cap": 50.0}, {"v_head_dim": 8}, {"is_cross_attention": True}):
        with pytest.raises(CpuPlatformError, match="layer attn"):
            refuse_layers(holder(**fields))


@given(st.integers(1, 9), st.lists(st.integers(0, 200), min_size=1, max_size=40, unique=True))
def test_ranks_share_all_cores_evenly_and_none_is_left_without(ranks, cores):
    shares = [cores_of_rank(rank, ranks, sorted(cores)) for rank in range(ranks)]
    assert all(shares)
    assert set().union(*shares) <= set(cores)
    if ranks <= len(cores):
        assert [core for share in shares for core in share] == sorted(cores)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_rank_out_of_range_is_an_error():
    with pytest.raises(ValueError, match="rank 2 of 2"):
        cores_of_rank(2, 2, [0, 1])


def test_on_arm64_nothing_asks_for_compiled_kernels(monkeypatch):
    from sglang.srt.distributed import bootstrap, parallel_state
    from sglang.srt.utils import common

    for module, name in (
        (bootstrap, "_bind_threads_if_cpu"),
        (bootstrap, "_init_cpu_threads_env"),
        (parallel_state, "is_shm_available"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back afterwards
    monkeypatch.setattr(bootstrap, "_is_cpu_arm64", True)
    monkeypatch.setattr(common, "is_host_cpu_arm64", lambda: True)
    replace_bindings()
    bootstrap._init_cpu_threads_env(local_omp_cpuid=[0], dist_init_method="tcp://127.0.0.1:1")
    assert not parallel_state.is_shm_available(torch.float32, 2, 2)


@pytest.mark.parametrize("features,expected", [("fp asimd bf16 i8mm", "bfloat16"), ("fp asimd", "float32")])
def test_on_arm64_the_default_dtype_follows_the_bf16_extension(monkeypatch, tmp_path, features, expected):
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor : 0\nFeatures : {features}\n")
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="aarch64"))
    monkeypatch.setattr(cpu, "CPUINFO", str(info))
    assert cpu.default_dtype() == expected


def test_the_platform_stays_away_where_there_is_an_accelerator_or_sglangs_own_cpu_engine(monkeypatch):
    assert cpu.activate() == cpu.PLATFORM_CLASS
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cpu.activate() is None
    monkeypatch.undo()
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert cpu.activate() is None


def test_a_switch_that_sglang_reads_at_import_asks_for_a_new_fork_server(monkeypatch):
    before = forkserver._import_time_switches()
    monkeypatch.setenv("SGLANG_RUN_ID", "another")
    monkeypatch.setenv("SGLANG_ENABLE_TORCH_COMPILE", "0")  # SGLang's own writing of a default
    monkeypatch.setenv("HOME", "/elsewhere")
    assert forkserver._import_time_switches() == before
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    assert forkserver._import_time_switches() != before


def test_functions_marked_for_compilation_stay_what_they_were():
    import sglang.srt.utils  # noqa: F401  (makes the platform)
    from sglang.srt.platforms import current_platform

    assert type(current_platform).__name__ == "DSparkCpuPlatform"

    def f(x):
        return x

    assert torch.compile(f) is f
    assert torch.compile(dynamic=True)(f) is f


def test_a_program_that_holds_an_engine_can_still_spawn_processes_of_its_own():
    before = multiprocessing.get_start_method(allow_none=True)
    forkserver.make_known()
    multiprocessing.set_start_method(forkserver.START_METHOD, force=True)
    try:
        child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(0,))
        child.start()
        child.join(120)
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert child.exitcode == 0


FREE_BYTES = """
import ctypes, sys
import torch
from sglang_dspark.cpu.processes.memory import keep_freed_memory

FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()

class MallocInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = MallocInfo
if sys.argv[1] == "kept":
    keep_freed_memory()

rows = torch.ones(25_000_000)  # above the largest size that malloc takes from its heap of its own accord
del rows
print(mallinfo().fordblks)  # bytes that are free and still this process's
"""


def test_what_a_step_frees_stays_for_the_next_step():
    """Without it a worker's acceptance of eight requests takes several times as long: each page is zeroed anew.

    malloc's own account is read: page faults also count what the kernel reclaims or merges meanwhile.
    """
    version = getattr(ctypes.CDLL(None), "gnu_get_libc_version", None)
    if version is not None:
        version.restype = ctypes.c_char_p
    if version is None or tuple(map(int, version().split(b"."))) < (2, 35):
        pytest.skip("not glibc 2.35 or newer: blocks of this size are never kept, or nothing can be read")
    free = {
        kind: int(
            subprocess.run([sys.executable, "-c", FREE_BYTES, kind], check=True, capture_output=True, text=True).stdout
        )
        for kind in ("kept", "given-back")
    }
    assert free["given-back"] < 100_000_000 <= free["kept"], free
