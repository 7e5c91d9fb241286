"""What overlap scheduling buys on a plain CPU: tokens a second with it and without it, plain and with DSpark.

    python -m benchmarks.cpu_overlap [--concurrency 1,8] [--tokens 64] [--out benchmarks/results/cpu_overlap]

With overlap the engine prepares the next batch while a device computes this one. On a CPU both use the same cores, so
our platform switches it off; this benchmark leaves it on, by a plugin for one server, and compares. Each server answers
the same number of equal prompts in mode off and in mode compact; off is run before and after (A, B, A2).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import httpx

from sglang_dspark.bench.local import LocalServer, plugin_path, start

KEEP_OVERLAP = """
def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def keep(result, args):
        args.disable_overlap_schedule = False
        return result

    HookRegistry.register("sglang_dspark.cpu.defaults.apply_defaults", keep, HookType.AFTER)
"""


PROMPTS = 8
THINGS = ("lighthouse", "library", "compiler", "bicycle", "treaty", "thermometer", "lullaby", "budget")


def tokens_per_second(server: LocalServer, requests: int, tokens: int, mode: str) -> float:
    """Of `requests` greedy answers that decode together; the better of two. Every server and mode gets the same prompts, whose
    texts, and so accepted lengths, are the same; one prompt alone would say how repetitive its own answer is."""
    server.configure(verify_mode=mode)
    rates = []
    for _ in range(2):
        seconds = 0.0
        for first in range(0, PROMPTS, requests):
            httpx.post(server.url + "/flush_cache", timeout=60)
            prompts = [
                f"Explain what a {THINGS[i % len(THINGS)]} is for, in {i + 2} sentences."
                for i in range(first, first + requests)
            ]
            begin = time.perf_counter()
            server.generate(prompts, max_new_tokens=tokens, ignore_eos=True, temperature=0)
            seconds += time.perf_counter() - begin
        rates.append(PROMPTS * tokens / seconds)
    return max(rates)


def arm(overlap: bool, concurrency: list[int], tokens: int) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        environment = plugin_path(Path(folder), "keep_overlap", KEEP_OVERLAP) if overlap else None
        server = start(Path(folder) / "log", "--log-level", "error", environment=environment)
        try:
            if server.get("/server_info")["disable_overlap_schedule"] == overlap:
                raise SystemExit("the server did not take the overlap setting")
            rows = []
            for r in concurrency:
                before, compact, after = (tokens_per_second(server, r, tokens, m) for m in ("off", "compact", "off"))
                rows.append(
                    {
                        "overlap": overlap,
                        "requests": r,
                        "off": statistics.mean((before, after)),
                        "spread": abs(before - after) / before,
                        "compact": compact,
                    }
                )
            return rows
        finally:
            server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="1,8")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu_overlap")
    options = parser.parse_args()
    load, concurrency = os.getloadavg()[0], [int(r) for r in options.concurrency.split(",")]
    rows = [row for overlap in (False, True, False) for row in arm(overlap, concurrency, options.tokens)]
    about = (
        f"`python -m benchmarks.cpu_overlap --concurrency {options.concurrency} --tokens {options.tokens}`, demo pair, "
        f"T = 0, {platform.machine()}, {os.cpu_count()} cores, load average before {load:.2f}, "
        f"{time.strftime('%Y-%m-%d')}. Tokens a second; servers in the order of the rows."
    )
    lines = ["| overlap | concurrency | off (spread) | compact |", "|---|---|---|---|"]
    lines += [
        f"| {'on' if r['overlap'] else 'off'} | {r['requests']} | {r['off']:.1f} ({100 * r['spread']:.0f} %) | "
        f"{r['compact']:.1f} |"
        for r in rows
    ]
    table = "\n".join(lines)
    options.out.with_suffix(".json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(f"# Overlap scheduling on a CPU\n\n{about}\n\n{table}\n")
    print(table)


if __name__ == "__main__":
    main()
