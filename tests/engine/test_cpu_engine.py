"""SGLang itself on the plain-CPU platform, with tiny targets in float32, against transformers' greedy text.

Bug class: anything between a request and its text: positions, KV slots of chunks, of prefix hits and of requests that
were thrown out and started again, the wrong default. Strength: the tiny targets' texts change completely at the first
wrong token, and the closest pair of best logits here is 1e-2 apart, far above float32's noise. Planted once each and
seen to fail: K written one slot late, and keys shortened by one in chunked extends.
"""

from __future__ import annotations

import time

import psutil
import pytest

from tests.engine.engines import by_transformers, engine_of, greedy, long_prompts
from tests.engine.tiny import PROMPTS, tiny_target


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def target(request, tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def engine(target):
    with engine_of(target) as running:
        yield running


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


def test_an_idle_engine_sleeps(engine):
    greedy(engine, PROMPTS[:1])
    time.sleep(1)  # the last answer's messages
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    before = sum(sum(process.cpu_times()[:2]) for process in processes)
    time.sleep(4)
    used = sum(sum(process.cpu_times()[:2]) for process in processes) - before
    assert used < 0.1 * 4, f"{used:.2f} s of CPU time in 4 s of doing nothing"
