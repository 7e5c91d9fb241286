"""Servers for tests: `bench.local` with a tiny target's flags."""

from __future__ import annotations

import time
from pathlib import Path

import httpx

from sglang_dspark.bench import local
from sglang_dspark.bench.local import LocalServer, plugin_path

__all__ = ["COMMON", "plugin_path", "start", "wait_for_refusal"]

COMMON = (
    *("--dtype", "float32", "--max-total-tokens", "8192", "--max-running-requests", "16"),
    *("--skip-server-warmup", "--log-level", "warning", "--random-seed", "7"),
)


def start(log: Path, *arguments: str, environment: dict[str, str] | None = None) -> LocalServer:
    """A server with `COMMON` and these arguments, ready; `environment` is added to this process's own."""
    return local.start(log, *COMMON, *arguments, environment=environment)


def wait_for_refusal(url: str) -> httpx.Response:
    """The first answer other than 200 to new work; the signal may arrive a moment after it was sent."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        body = {"text": "new", "sampling_params": {"max_new_tokens": 1}}
        answer = httpx.post(url + "/generate", json=body, timeout=120)
        if answer.status_code != 200:
            return answer
    raise AssertionError("new work was accepted to the end")
