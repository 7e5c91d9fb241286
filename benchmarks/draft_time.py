"""What a draft pass costs in the running server, at several numbers of requests, and the speedup that follows.

    python -m benchmarks.draft_time [--requests 1,4,8,16] [--tokens 128] [--out benchmarks/results/draft_time]

Starts one server with the demo pair in static mode: every step drafts and verifies whole blocks. R answers of equal
length decode together, and the meter's own sums are read twice while all R run. *Draft* is the backbone, the sequential head with its sampling, and nothing else; *verify* the target's forward
over R·(γ+1) rows; *accept* acceptance and writing the draft's KV; *host* planning, packing, bookkeeping. *Plain* is
a whole step of the same server in mode off, before and after (A, B, A2). The speedup is accepted length × plain / step:
what static verification brings at that R, measured on the same answers. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from pathlib import Path

from sglang_dspark.bench.bracket import gained
from sglang_dspark.bench.local import LocalServer, start

CONTEXT = "Write a long story about a lighthouse keeper and the sea."


def window(server: LocalServer, requests: int, tokens: int, temperature: float) -> tuple[dict, dict]:
    """The status after all `requests` answers decode together, and again before the first of them ends."""
    prompts = [f"{CONTEXT} Variant {i}, {time.time()}." for i in range(requests)]
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": temperature}
    answers = threading.Thread(target=server.generate, args=(prompts,), kwargs=sampling)
    answers.start()
    first = last = None
    while answers.is_alive():
        status = server.get("/dspark/status")["ranks"][0]
        running = status["last_step"].get("requests") == requests
        if running and first is None:
            first = status
        elif running and first is not None:
            last = status
        time.sleep(0.25)
    answers.join()
    if first is None or last is None or last["timed_steps"] <= first["timed_steps"]:
        raise SystemExit(f"{requests} answers of {tokens} tokens ended before they could be timed: give more --tokens")
    return first, last


def measure(server: LocalServer, requests: int, tokens: int, temperature: float, **mode) -> dict:
    """Milliseconds a step of one mode, in parts, and the accepted length."""
    server.configure(**mode)
    first, last = window(server, requests, tokens, temperature)
    figures = gained([first], [last])
    backbone = 1e3 * (last["seconds"]["backbone"] - first["seconds"]["backbone"]) / figures["steps"]
    return {**figures, "backbone_ms": backbone, "head_ms": figures["draft_ms"] - backbone}


def row(server: LocalServer, requests: int, tokens: int, temperature: float) -> dict:
    """One number of requests: plain, static, plain."""
    plain = {"verify_mode": "off"}
    before = measure(server, requests, tokens, temperature, **plain)
    static = measure(server, requests, 2 * tokens, temperature, verify_mode="static")
    after = measure(server, requests, tokens, temperature, **plain)
    step = statistics.mean((before["step_ms"], after["step_ms"]))
    return {
        "requests": requests,
        **static,
        "plain_step_ms": step,
        "plain_spread": abs(before["step_ms"] - after["step_ms"]) / step,
        "speedup": static["tokens_per_step"] * step / static["step_ms"],
    }


def table(rows: list[dict]) -> str:
    columns = (
        "R",
        "draft pass, ms",
        "backbone",
        "head",
        "verify, ms",
        "accept, ms",
        "host, ms",
        "step, ms",
        "plain step, ms (spread)",
        "accepted length",
        "speedup of static",
    )
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for r in rows:
        lines.append(
            f"| {r['requests']} | {r['draft_ms']:.1f} | {r['backbone_ms']:.1f} | {r['head_ms']:.1f} | "
            f"{r['verify_ms']:.1f} | {r['accept_ms']:.1f} | {r['host_ms']:.1f} | {r['step_ms']:.1f} | {r['plain_step_ms']:.1f} "
            f"({100 * r['plain_spread']:.0f} %) | {r['tokens_per_step']:.2f} | {r['speedup']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="1,4,8,16")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "draft_time")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        server = start(
            Path(folder) / "log", *("--verify-mode", "static", "--max-running-requests", "32", "--log-level", "error")
        )
        try:
            rows = [row(server, int(r), options.tokens, options.temperature) for r in options.requests.split(",")]
            gamma = server.get("/dspark/status")["ranks"][0]["gamma"]
        finally:
            server.stop()
    about = (
        f"`python -m benchmarks.draft_time --requests {options.requests} --tokens {options.tokens}`, demo pair, "
        f"γ = {gamma}, T = {options.temperature:g}, {platform.machine()}, {os.cpu_count()} cores, load average "
        f"before {load:.2f}, {time.strftime('%Y-%m-%d')}."
    )
    options.out.with_suffix(".json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    text = f"# What a draft pass costs in the server\n\n{about}\n\n{__doc__.split('[--out')[0].splitlines()[0]}\n\n"
    options.out.with_suffix(".md").write_text(text + table(rows) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
