"""A server ends as a command should: with a status and a last line that say why, without a traceback and without an orphan.

Bug classes: SGLang's own answer to a dead child (SIGKILL for everybody, the reason lost in a traceback); processes left
behind. Starts that are interrupted, whose scheduler dies, or that succeed, are real; what is known before loading is in
tests/commands/test_serve_errors.py.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.engine.tiny import tiny_target

SERVE = [sys.executable, "-m", "sglang_dspark.cli", "serve"]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def lines_of(stderr: str) -> list[str]:
    """What a person reads, without the warnings of libraries."""
    return [
        line for line in stderr.splitlines() if line.strip() and "Warning" not in line and "warnings.warn" not in line
    ]


@pytest.fixture
def start(tmp_path, port):
    """Start a server in a session of its own; whatever a failing test leaves of it is killed."""
    started = []

    def start_one(target: Path) -> tuple[subprocess.Popen, Path]:
        log = tmp_path / "log"
        with log.open("w") as output:
            command = [*SERVE, str(target), "--verify-mode", "off", "--port", str(port)]
            started.append(subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True))
        return started[-1], log

    yield start_one
    for server in started:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def assert_nothing_is_left(session: int) -> None:
    left = []
    for process in psutil.process_iter(["pid", "name", "status"]):
        try:
            if os.getsid(process.pid) == session and process.info["status"] != psutil.STATUS_ZOMBIE:
                left.append(process.info)
        except (ProcessLookupError, PermissionError):
            pass
    assert left == []


def test_a_scheduler_that_dies_while_loading_ends_the_server_with_its_reason_last(tmp_path, start):
    target = tiny_target(tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"vocab_size": 640}))  # the weights say 512
    server, log = start(target)
    assert server.wait(timeout=200) == 1
    last = lines_of(log.read_text())[-1]
    assert last.startswith("sglang-dspark serve: the server stopped: ") and "Error" in last
    assert_nothing_is_left(server.pid)


def wait_until_ready(server: subprocess.Popen, log: Path) -> str:
    """The curl line that the server printed when it was ready."""
    deadline = time.monotonic() + 250
    while not (lines := [line for line in log.read_text().splitlines() if line.startswith("curl ")]):
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.5)
    return lines[0]


def test_a_ready_server_prints_a_request_that_works_and_ends_cleanly_on_sigterm(target, start):
    server, log = start(target)
    address, *_, body = [
        word for word in shlex.split(wait_until_ready(server, log)) if word[:4] == "http" or word[0] == "{"
    ]
    request = urllib.request.Request(address, body.encode(), {"Content-Type": "application/json"})
    answer = json.load(urllib.request.urlopen(request, timeout=60))
    assert answer["usage"]["completion_tokens"] >= 1
    server.terminate()
    assert server.wait(timeout=60) == 0
    assert_nothing_is_left(server.pid)


@pytest.mark.long
def test_a_scheduler_that_is_killed_while_serving_ends_the_server_with_status_1(target, start):
    server, log = start(target)
    wait_until_ready(server, log)
    children = psutil.Process(server.pid).children(recursive=True)
    scheduler = max(children, key=lambda child: child.memory_info().rss)  # it holds the model and the KV pool
    scheduler.kill()
    assert server.wait(timeout=60) == 1
    assert log.read_text().splitlines()[-1].startswith("sglang-dspark serve: the server stopped")
    assert_nothing_is_left(server.pid)


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT], ids=lambda kind: kind.name)
def test_a_signal_while_loading_stops_every_process(target, start, kind):
    server, log = start(target)
    parent = psutil.Process(server.pid)
    deadline = time.monotonic() + 200
    while len(parent.children(recursive=True)) < 2 and server.poll() is None:  # the engine's processes are being made
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    server.send_signal(kind)
    assert server.wait(timeout=60) == 128 + kind
    assert "Traceback" not in log.read_text()
    assert_nothing_is_left(server.pid)
