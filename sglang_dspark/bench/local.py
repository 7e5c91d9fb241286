"""A server in a process of its own: started on a free port, asked over HTTP, ended with everything that it started."""

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

from .server import ServerError


@dataclass(frozen=True)
class LocalServer:
    """A server of this machine: `url`, its process (leader of a process group), and the file that holds its output."""

    url: str
    process: subprocess.Popen
    log: Path

    def post(self, path: str, body: dict, expect: int = 200) -> dict:
        """The answer to a JSON body.

        Raises:
            ServerError: another status than `expect`.
        """
        return self._checked(httpx.post(self.url + path, json=body, timeout=300), expect)

    def get(self, path: str) -> dict:
        """The JSON at `path`.

        Raises:
            ServerError: another status than 200.
        """
        return self._checked(httpx.get(self.url + path, timeout=60), 200)

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
        """The end of the output, for messages."""
        return self.log.read_text(errors="replace")[-2000:]

    def stop(self) -> None:
        """End it with SIGTERM, and after a minute its whole group with SIGKILL."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End its whole group with SIGKILL, where nothing is asked of how it ends: an idle server takes up to five seconds
        to answer SIGTERM. One that has ended already is left alone."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)

    def _checked(self, answer: httpx.Response, expect: int) -> dict:
        if answer.status_code != expect:
            raise ServerError(f"{answer.url} answered {answer.status_code}: {answer.text[:500]}\n{self.tail()}")
        return answer.json()


def start(log: Path, *arguments: str, timeout: float = 240, environment: dict[str, str] | None = None) -> LocalServer:
    """Start `sglang-dspark serve` with these arguments and wait until it answers.

    Args:
        log: the file that gets its output.
        timeout: seconds until it must be ready.
        environment: added to this process's own.

    Raises:
        ServerError: it ended, or was not ready in time; it does not run any more.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("sglang-dspark")), "serve", "--port", str(port), *arguments]
    with open(log, "w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
    server = LocalServer(f"http://127.0.0.1:{port}", process, log)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"the server ended with {process.returncode}: {server.tail()}")
        try:
            if httpx.get(server.url + "/health", timeout=2).status_code == 200:
                return server
        except httpx.TransportError:
            pass
        time.sleep(0.3)
    server.stop()
    raise ServerError(f"the server was not ready after {timeout:g} s: {server.tail()}")


def plugin_path(folder: Path, name: str, source: str) -> dict[str, str]:
    """A plugin of the engine for one server: `source` defines `register`; returns the environment that puts it on the path."""
    (folder / f"{name}.py").write_text(source)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {name}:register\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}
