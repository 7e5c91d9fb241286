"""Every window at every load: two thousand steps of random budgets while requests join, end, abort and are retracted.

Bug class: a bucket (R, w) that only some load reaches, where a row, slot or length is one off; KV slots that leak or are
freed twice (the engine checks its pool whenever it is idle and dies on a mismatch). A plugin that only this test puts
on the path replaces the planner's budget by a random one, which is lossless for any budget drawn beforehand.
"""

from __future__ import annotations

import random
import threading

import httpx
import pytest

from tests.engine.tiny import PROMPTS
from tests.server.live import plugin_path, start

RANDOM_BUDGET = """
import random

CHANCE = random.Random(5)


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    HookRegistry.register("dspark_scheduler.planner.Planner.budget", at_random, HookType.AFTER)


def at_random(plan, planner, step, request_ids, *args, **kwargs):
    from dspark_scheduler import Budget
    import numpy as np
    most = int(np.broadcast_to(planner._high, len(request_ids)).sum())
    tokens = CHANCE.randint(0, most)
    deepest = int(np.max(planner._high))
    if CHANCE.random() < 0.1 or deepest == 0:
        plan = Budget(0, 1.0, 1e-3, True, 0)
    else:
        plan = Budget(tokens, 1.0, 1e-3, False, deepest)
    planner.last_budget = plan
    return plan
"""
STEPS = 2000
FIXED = "Numbers such as 12"


@pytest.fixture(scope="module", params=["plain", "retracting"])
def random_budgets(request, pair, tmp_path_factory):
    environment = plugin_path(tmp_path_factory.mktemp("plugin"), "random_budget", RANDOM_BUDGET)
    if request.param == "retracting":
        environment |= {"SGLANG_TEST_RETRACT": "1"}
    target, draft = pair
    server = start(
        tmp_path_factory.mktemp("logs") / f"{request.param}.log",
        "--model-path",
        str(target),
        "--speculative-draft-model-path",
        str(draft),
        "--chunked-prefill-size",
        "64",
        environment=environment,
    )
    yield server
    server.kill()


def client(server, stop: threading.Event, seed: int, faults: list) -> None:
    """Requests of every kind, some given up in the middle of their stream."""
    chance = random.Random(seed)
    with httpx.Client(timeout=120) as http:
        while not stop.is_set():
            body = {
                "text": chance.choice(PROMPTS) * chance.randint(1, 12),
                "stream": chance.random() < 0.3,
                "sampling_params": {
                    "temperature": chance.choice([0, 0.7, 1.0]),
                    "max_new_tokens": chance.randint(1, 60),
                    "sampling_seed": chance.choice([None, 3]),
                    "top_p": chance.choice([1.0, 0.9]),
                },
            }
            try:
                if not body["stream"]:
                    assert http.post(server.url + "/generate", json=body).status_code == 200
                    continue
                with http.stream("POST", server.url + "/generate", json=body) as lines:
                    for n, _ in enumerate(lines.iter_lines()):
                        if n > chance.randint(0, 30):
                            break  # closing the stream aborts the request
            except Exception as fault:  # noqa: BLE001 (collected, and reported by the test)
                faults.append(fault)
                return


@pytest.mark.parametrize("policy", ["causal", "ahead"])
def test_a_soak_of_random_budgets_loses_no_slot_and_moves_no_text(random_budgets, plain, policy):
    server = random_budgets
    server.configure(verify_mode="compact", window_policy=policy)
    expected = plain.generate(FIXED, temperature=0, max_new_tokens=40)[0]["output_ids"]
    stop, faults = threading.Event(), []
    clients = [threading.Thread(target=client, args=(server, stop, seed, faults)) for seed in range(6)]
    for thread in clients:
        thread.start()
    try:
        begun = steps = server.get("/dspark/status")["ranks"][0]["steps"]
        while steps - begun < STEPS // 4 and not faults:
            assert server.generate(FIXED, temperature=0, max_new_tokens=40)[0]["output_ids"] == expected
            steps = server.get("/dspark/status")["ranks"][0]["steps"]
    finally:
        stop.set()
        for thread in clients:
            thread.join()
    assert not faults, (faults, server.tail())
    windows = server.get("/dspark/status")["ranks"][0]["windows"]
    assert all(count > 0 for count in windows), f"a window size was never used: {windows}"
    assert httpx.get(server.url + "/health_generate", timeout=60).status_code == 200
    assert server.process.poll() is None and "leak" not in server.log.read_text()
