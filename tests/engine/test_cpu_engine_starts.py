"""Engines started in some particular way on the plain-CPU platform: chunks, retraction, no compiler, the default dtype.

Bug class: as in test_cpu_engine, for what a start decides. Each test has an engine of its own (see `engines`).
Strength: whole greedy texts against transformers'. Planted once and seen to fail: keys shortened by one in chunked
extends.
"""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.engine.engines import LENGTH, by_transformers, engine_of, greedy, long_prompts
from tests.engine.tiny import PROMPTS, tiny_target


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("llama"), "llama")


def test_prompts_cut_into_chunks_give_the_same_text(llama):
    with engine_of(llama, chunked_prefill_size=16) as engine:
        answers = greedy(engine, long_prompts())
    assert [answer["output_ids"] for answer in answers] == by_transformers(llama, long_prompts())


def test_requests_thrown_out_and_started_again_give_the_same_text(llama, monkeypatch):
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    with engine_of(llama, max_total_tokens=1024) as engine:
        answers = greedy(engine, PROMPTS[:6])
    assert [answer["output_ids"] for answer in answers] == by_transformers(llama, PROMPTS[:6])
    assert sum(answer["meta_info"].get("num_retractions", 0) for answer in answers) > 0


def test_no_compiler_on_the_path_is_needed_even_for_a_penalty(llama, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", path_without_compilers(tmp_path))
    for compiler in ("cc", "gcc", "g++", "c++", "clang", "clang++"):
        assert shutil.which(compiler) is None
    with engine_of(llama) as engine:
        answers = greedy(engine, PROMPTS[:3], repetition_penalty=1.3)
        sampled = engine.generate(PROMPTS[:3], {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01, "max_new_tokens": 8})
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


def test_auto_means_the_dtype_that_this_processor_multiplies_and_the_pool_has_it_too(llama):
    from sglang_dspark.cpu import default_dtype

    with engine_of(llama, dtype="auto", max_total_tokens=4096) as engine:
        memory = engine.get_server_info()["internal_states"][0]["memory_usage"]
        dtype = engine.tokenizer_manager.model_config.dtype
    assert str(dtype) == f"torch.{default_dtype()}"
    layers, kv_heads, head_dim = 4, 2, 16
    assert memory["kvcache"] == pytest.approx(
        2 * layers * kv_heads * head_dim * 4097 * dtype.itemsize / 2**30, abs=1e-3
    )
