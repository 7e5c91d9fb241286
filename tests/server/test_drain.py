"""The end of a server whose whole process group is told to end, as systemd, a container's init or a terminal does it.

Bug class: a process of the server that obeys the signal while the engine still needs it: running requests are cut off,
or the server reports a dead child and exits with 1. Planted once and seen to fail: a fork server that obeys SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal

import httpx
import psutil

from tests.server.live import start, wait_for_refusal

NEW_TOKENS = 1800
BODY = {
    "text": "The river ran",
    "stream": True,
    "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
}


def test_a_group_told_to_end_finishes_its_requests_and_refuses_new_ones(pair, tmp_path):
    target, draft = pair
    server = start(
        tmp_path / "drain.log",
        "--model-path",
        str(target),
        "--speculative-draft-model-path",
        str(draft),
        "--verify-mode",
        "static",
        "--disable-radix-cache",
    )
    try:
        family = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
        with httpx.stream("POST", server.url + "/generate", json=BODY, timeout=300) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
            first = json.loads(next(lines)[6:])
            os.killpg(server.process.pid, signal.SIGTERM)
            refused = wait_for_refusal(server.url)
            *_, last = lines
        last = json.loads(last[6:])
        assert first["meta_info"]["completion_tokens"] < NEW_TOKENS == last["meta_info"]["completion_tokens"], (
            server.tail()
        )
        assert last["meta_info"]["finish_reason"]["type"] == "length"
        assert refused.status_code == 503 and refused.json()["error"]["type"] == "shutting_down"
        assert server.process.wait(120) == 0, server.tail()
        drained = server.log.read_text(errors="replace").partition("SIGTERM received")[2]
        assert drained and "Traceback" not in drained
        _, left = psutil.wait_procs(family, timeout=30)
        assert not left
    finally:
        server.stop()
