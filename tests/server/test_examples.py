"""The chat example runs against a server, and its requests' bounds change nothing but the time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.server.modes import CAUSAL

ROOT = Path(__file__).parents[2]


def test_the_chat_example_gives_one_text_under_every_bound(dspark):
    dspark.configure(**CAUSAL)
    command = [sys.executable, "examples/chat.py", "The river ran", "--url", f"{dspark.url}/v1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [line.partition(" s): ")[2] for line in done.stdout.splitlines() if " s): " in line]
    assert len(answers) == 3 and len(set(answers)) == 1 and answers[0], done.stdout
