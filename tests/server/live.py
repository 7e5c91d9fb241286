"""Real servers for tests: `sglang-dspark serve` in a process of its own, on a free port, with a tiny target."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

COMMON = (
    "--dtype",
    "float32",
    "--max-total-tokens",
    "8192",
    "--max-running-requests",
    "16",
    "--skip-server-warmup",
    "--log-level",
    "warning",
    "--random-seed",
    "7",
)


@dataclass
class Server:
    """A running server: `url`, its process, and where its output goes."""

    url: str
    process: subprocess.Popen
    log: Path

    def post(self, path: str, body: dict, expect: int = 200) -> dict:
        answer = httpx.post(self.url + path, json=body, timeout=300)
        assert answer.status_code == expect, (answer.status_code, answer.text[:500], self.tail())
        return answer.json()

    def get(self, path: str) -> dict:
        answer = httpx.get(self.url + path, timeout=60)
        assert answer.status_code == 200, (answer.status_code, answer.text[:500])
        return answer.json()

    def generate(self, text: str | list[str], **sampling) -> list[dict]:
        """Answers of `/generate`, one per prompt, in order."""
        prompts = [text] if isinstance(text, str) else text
        return self.post("/generate", {"text": prompts, "sampling_params": sampling})

    def configure(self, **settings) -> None:
        """Switch settings; naming a mode without a policy also forgets the policy of the mode before."""
        if "verify_mode" in settings:
            settings.setdefault("window_policy", None)
        self.post("/dspark/config", settings)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)


def start(
    log: Path,
    *arguments: str,
    timeout: float = 240,
    environment: dict[str, str] | None = None,
    common: tuple[str, ...] = COMMON,
) -> Server:
    """Start a server and wait until it answers; `environment` is added to this process's own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("sglang-dspark")), "serve", "--port", str(port), *common, *arguments]
    # A tiny model gains nothing from a second thread, and on a busy machine every barrier between two costs a timeslice.
    threads = {"OMP_NUM_THREADS": "1"} if common is COMMON else {}
    with open(log, "w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**threads, **os.environ, **(environment or {})},
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended with {process.returncode}: {server.tail()}"
        try:
            if httpx.get(server.url + "/health", timeout=2).status_code == 200:
                return server
        except httpx.TransportError:
            pass
        time.sleep(0.3)
    server.stop()
    raise AssertionError(f"the server was not ready after {timeout} s: {server.tail()}")


def wait_for_refusal(url: str) -> httpx.Response:
    """The first answer other than 200 to new work; the signal may arrive a moment after it was sent."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        body = {"text": "new", "sampling_params": {"max_new_tokens": 1}}
        answer = httpx.post(url + "/generate", json=body, timeout=120)
        if answer.status_code != 200:
            return answer
    raise AssertionError("new work was accepted to the end")


def plugin_path(folder: Path, name: str, source: str) -> dict[str, str]:
    """A plugin of the engine for one test: `source` defines `register`; returns the environment that puts it on the path."""
    (folder / f"{name}.py").write_text(source)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {name}:register\n")
    return {"PYTHONPATH": str(folder)}
