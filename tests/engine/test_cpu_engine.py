"""SGLang itself on the plain-CPU platform, with tiny targets in float32, against transformers' greedy text.

Bug class: anything between a request and its text: positions, KV slots of chunks, of prefix hits and of requests that
were thrown out and started again, the wrong default. Strength: the tiny targets' texts change completely at the first
wrong token, and the closest pair of best logits here is 1e-2 apart, far above float32's noise. Planted once each and
seen to fail: K written one slot late, and keys shortened by one in chunked extends.
"""

from __future__ import annotations

import os
import shutil
import time

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.engine.tiny import PROMPTS, tiny_target

LENGTH = 48


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def target(request, tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("llama"), "llama")


def start(path, **arguments):
    import sglang

    return sglang.Engine(
        model_path=str(path), log_level="error", skip_server_warmup=True,
        **{"dtype": "float32", "max_total_tokens": 4096, **arguments},
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine(target):
    running = start(target)
    yield running
    running.shutdown()


def greedy(engine, prompts, length=LENGTH, **sampling):
    ids = [{"input_ids": prompts} if isinstance(prompts[0], list) else {"prompt": prompts}][0]
    parameters = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True, **sampling}
    return engine.generate(sampling_params=parameters, **ids)


def by_transformers(path, prompts, length=LENGTH, **generation):
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt]) if isinstance(prompt, list) else tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=length, do_sample=False, pad_token_id=0, **generation)
        texts.append(out[0, ids.shape[1] :].tolist())
    return texts


def long_prompts(count=4, length=150):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(6, 500, (count, length), generator=generator).tolist()


def test_greedy_text_is_that_of_transformers_alone_and_together(engine, target):
    expected = by_transformers(target, PROMPTS[:10])
    assert [greedy(engine, [prompt])[0]["output_ids"] for prompt in PROMPTS[:3]] == expected[:3]
    assert [answer["output_ids"] for answer in greedy(engine, PROMPTS[:10])] == expected


def test_a_prefix_hit_changes_the_work_but_not_the_text(engine, target):
    prompt = long_prompts()[0]
    branches = [prompt[:100] + tail for tail in ([7, 8, 9], [70, 80, 90, 100], [11])]
    expected = by_transformers(target, branches)
    engine.flush_cache()
    answers = [greedy(engine, [branch])[0] for branch in branches]
    assert [answer["output_ids"] for answer in answers] == expected
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [0, 100, 100]


def test_prompts_cut_into_chunks_give_the_same_text(llama):
    engine = start(llama, chunked_prefill_size=16)
    try:
        answers = greedy(engine, long_prompts())
    finally:
        engine.shutdown()
    assert [answer["output_ids"] for answer in answers] == by_transformers(llama, long_prompts())


def test_requests_thrown_out_and_started_again_give_the_same_text(llama, monkeypatch):
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    engine = start(llama, max_total_tokens=1024)
    try:
        answers = greedy(engine, PROMPTS[:6])
    finally:
        engine.shutdown()
    assert [answer["output_ids"] for answer in answers] == by_transformers(llama, PROMPTS[:6])
    assert sum(answer["meta_info"].get("num_retractions", 0) for answer in answers) > 0


def test_no_compiler_on_the_path_is_needed_even_for_a_penalty(llama, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", path_without_compilers(tmp_path))
    for compiler in ("cc", "gcc", "g++", "c++", "clang", "clang++"):
        assert shutil.which(compiler) is None
    engine = start(llama)
    try:
        answers = greedy(engine, PROMPTS[:3], repetition_penalty=1.3)
        sampled = engine.generate(PROMPTS[:3], {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01, "max_new_tokens": 8})
    finally:
        engine.shutdown()
    assert [answer["output_ids"] for answer in answers] == penalised(llama, PROMPTS[:3], 1.3)
    assert all(answer["output_ids"] for answer in sampled)


def penalised(path, prompts, penalty, length=LENGTH):
    """Greedy text where the logits of what was already written (not of the prompt, as SGLang has it) are penalised."""
    tokenizer, model = (
        AutoTokenizer.from_pretrained(path),
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
    )
    texts = []
    for prompt in prompts:
        ids = tokenizer(prompt).input_ids
        written = []
        for _ in range(length):
            with torch.no_grad():
                logits = model(torch.tensor([ids + written])).logits[0, -1]
            old = torch.tensor(written, dtype=torch.long)
            logits[old] = torch.where(logits[old] > 0, logits[old] / penalty, logits[old] * penalty)
            written.append(int(logits.argmax()))
        texts.append(written)
    return texts


def path_without_compilers(folder):
    """A PATH with the few tools that SGLang calls (lscpu), and no compiler."""
    for tool in ("lscpu", "sh", "env", "uname"):
        (folder / tool).symlink_to(shutil.which(tool))
    return str(folder)


def test_a_triton_launch_would_be_an_error_so_no_test_here_had_one():
    import triton
    import triton.language as tl

    @triton.jit
    def nothing(x):
        tl.store(x, 0)

    assert "TRITON_INTERPRET" not in os.environ and not triton.knobs.runtime.interpret
    with pytest.raises(RuntimeError, match="drivers"):
        nothing[(1,)](torch.zeros(1))


def test_an_idle_engine_sleeps(engine):
    greedy(engine, PROMPTS[:1])
    time.sleep(1)  # the last answer's messages
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    before = sum(sum(process.cpu_times()[:2]) for process in processes)
    time.sleep(4)
    used = sum(sum(process.cpu_times()[:2]) for process in processes) - before
    assert used < 0.1 * 4, f"{used:.2f} s of CPU time in 4 s of doing nothing"


def test_auto_means_the_dtype_that_this_processor_multiplies_and_the_pool_has_it_too(llama):
    from sglang_dspark.cpu import default_dtype

    engine = start(llama, dtype="auto", max_total_tokens=4096)
    try:
        memory = engine.get_server_info()["internal_states"][0]["memory_usage"]
        dtype = engine.tokenizer_manager.model_config.dtype
    finally:
        engine.shutdown()
    assert str(dtype) == f"torch.{default_dtype()}"
    layers, kv_heads, head_dim = 4, 2, 16
    assert memory["kvcache"] == pytest.approx(
        2 * layers * kv_heads * head_dim * 4097 * dtype.itemsize / 2**30, abs=1e-3
    )
