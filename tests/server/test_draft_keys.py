"""The draft's own keys and values, whoever wrote them: a prefill, a plain step, or a plain step that put it off.

Bug class: keys that are never written, or written over somebody else's. Text cannot tell, because drafts are verified;
what tells is the draft's confidence in what it drafts behind them.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.server.live import start


def test_keys_that_plain_steps_put_off_are_the_ones_that_a_prefill_would_have_written(pair, tmp_path):
    """The draft's confidence in what follows, over a prefix that plain steps wrote and over one that a prefill did."""
    target, draft = pair
    server = start(
        tmp_path / "server.log",
        "--model-path",
        str(target),
        "--speculative-draft-model-path",
        str(draft),
        "--calibration",
        "off",
        "--verify-mode",
        "static",
        "--enable-cache-report",
    )
    prompts = [[7 * i + j + 20 for j in range(9)] for i in range(5)]

    def ask_for(ids: list[int], count: int) -> dict:
        return server.post(
            "/generate",
            {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}},
        )

    def confidence(continued: list[list[int]]) -> tuple[float, int]:
        """Sum of the draft's confidence over what it drafted behind each prefix, and the tokens found in the cache."""
        before = server.get("/dspark/status")["ranks"][0]["acceptance"]
        cached = sum(ask_for(ids, 6)["meta_info"]["cached_tokens"] for ids in continued)
        after = server.get("/dspark/status")["ranks"][0]["acceptance"]
        sums = [sum((p or 0) * n for p, n in zip(a["predicted"], a["confident"])) for a in (before, after)]
        return sums[1] - sums[0], cached

    try:
        server.configure(verify_mode="off")
        with ThreadPoolExecutor(len(prompts)) as clients:  # of different lengths, so that slots change hands meanwhile
            answers = list(clients.map(ask_for, prompts, range(12, 62, 10)))
        continued = [ids + answer["output_ids"] for ids, answer in zip(prompts, answers)]
        server.configure(verify_mode="static")
        decoded, found = confidence(continued)
        assert httpx.post(server.url + "/flush_cache", timeout=60).status_code == 200
        prefilled, missed = confidence(continued)
    finally:
        server.kill()
    assert found > sum(map(len, continued)) * 0.9 and missed == 0
    assert decoded == pytest.approx(prefilled, abs=1e-3) and prefilled > 1
