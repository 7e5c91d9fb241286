"""The load sweep of a running server against plain decoding, every window policy and every static length.

    python benchmarks/serving.py [--concurrency 1,4,8,16] [--temperature 1] [--requests 24] [--out DIR]

Starts two servers with the demo pair: one with --verify-mode off, which loads no draft and is the control, and one that
switches its mode between runs. Every arm is run between two runs of the control, on prompts of its own, by SGLang's load
generator (`sglang-dspark bench` does that; this file only chooses the arms). `min_free_slots_delay` is equal in all
arms. Run it on an idle machine: the receipt shows the spread of the controls.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.server.live import start

GAMMA = 5
SCHEDULE = "schedule=[[1,3,5],[4,7,2],[8,64,1]]"
COMMON = ("--max-running-requests", "64", "--log-level", "error")


def arms() -> list[str]:
    """Static at every length, the hand-made schedule by load, the three policies, and the measuring mode."""
    return [*(f"static-{k}" for k in range(1, GAMMA + 1)), SCHEDULE, "compact+causal", "compact+lagged", "compact+ahead",
            "cap-accept"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--concurrency", default="1,4,8,16")
    parser.add_argument("--temperature", default="1")
    parser.add_argument("--requests", default="24")
    parser.add_argument("--output-tokens", default="96")
    parser.add_argument("--arm", action="append", help="only these arms")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/serving"))
    options = parser.parse_args()
    logs = Path(tempfile.mkdtemp())
    plain = start(logs / "plain.log", "--verify-mode", "off", *COMMON, common=())
    dspark = start(logs / "dspark.log", *COMMON, common=())
    try:
        command = [str(Path(sys.executable).with_name("sglang-dspark")), "bench", "--url", dspark.url,
                   "--control", f"off@{plain.url}", "--traffic", "all", "--concurrency", options.concurrency,
                   "--requests", options.requests, "--output-tokens", options.output_tokens,
                   "--temperature", options.temperature, "--out", str(options.out)]
        for arm in options.arm or arms():
            command += ["--arm", arm]
        return subprocess.run(command, check=False).returncode
    finally:
        plain.stop()
        dspark.stop()


if __name__ == "__main__":
    sys.exit(main())
