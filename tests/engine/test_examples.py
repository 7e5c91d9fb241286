"""The example with an `Engine` runs as it stands, in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_engine_example_answers_and_speculates(pair):
    command = [sys.executable, "examples/engine.py", *map(str, pair)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [int(n) for n in re.findall(r": 32 tokens in (\d+) steps", done.stdout)]
    assert len(steps) == 2 and min(steps) < 31, "no draft was accepted"
