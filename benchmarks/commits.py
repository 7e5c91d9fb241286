"""Two commits of this repository in turn under one steady load: what a change costs or gains, step by step.

    git worktree add --detach /tmp/before COMMIT
    python benchmarks/commits.py --before /tmp/before [--concurrency 1,8] [--arm off --arm static-3] [--cycles 8]

Two servers with the demo pair run from two checkouts in one environment. Each has its own clients, which never pause; the
one whose turn it is not is stopped by SIGSTOP. A cycle asks every arm for before, after, before, after: a ratio is the
mean of the two of a checkout over the mean of the other's, and the first `before` over the second is the error of the
machine. Both checkouts are asked at the same policy, so a step has the same work in both; the texts at temperature 0 are
the same too, but for near-ties.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.serving import COMMON, Prompts
from benchmarks.steady import Load, Pair, seconds_of
from sglang_dspark.bench.arms import parse_arm
from sglang_dspark.bench.local import LocalServer, start
from sglang_dspark.bench.receipt import machine
from sglang_dspark.bench.server import Server

HERE = Path(__file__).parents[1]
TURNS = ("before", "after", "before", "after")


def served_from(checkout: Path, log: Path) -> LocalServer:
    """A server whose modules are those of `checkout`."""
    path = os.pathsep.join(str(checkout / folder) for folder in (".", "scheduler", "kernels"))
    # Safe: else a child that runs `-c` finds the modules of the folder that this script was started in.
    environment = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    return start(log, *COMMON, "--served-model-name", "demo", environment=environment)


async def turn(pair: Pair, server: LocalServer, load: Load, options) -> dict:
    """Tokens per second at the clients, milliseconds of a step, tokens a request gets by one."""
    pair.let_run(server)
    asked = Server(server.url)
    before, began = (await asyncio.to_thread(asked.status))[0], time.perf_counter()
    rate = await seconds_of(load, options)
    after, seconds = (await asyncio.to_thread(asked.status))[0], time.perf_counter() - began
    steps = after["steps"] - before["steps"]
    requests = after["mean_requests"] * after["steps"] - before["mean_requests"] * before["steps"]
    committed = after["tokens"]["committed"] - before["tokens"]["committed"]
    return {"rate": rate, "ms": 1000 * seconds / steps, "tokens_per_step": committed / requests}


async def cell(pair: Pair, concurrency: int, options) -> dict[str, list[list[dict]]]:
    """{arm: cycles of four turns} at one concurrency."""
    rows, cycles = Prompts(400, options.seed).take(400, options.temperature), {arm: [] for arm in options.arm}
    servers = {"before": pair.control, "after": pair.ours}
    timeout = aiohttp.ClientTimeout(total=None, sock_read=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        loads = {name: Load(server.url, rows) for name, server in servers.items()}
        for name, server in servers.items():  # each fills its batch alone
            pair.let_run(server)
            loads[name].begin(concurrency, session)
            await asyncio.sleep(options.fill)
        for _ in range(options.cycles):
            for arm in options.arm:
                for server in servers.values():
                    pair.let_run(server)
                    await asyncio.to_thread(Server(server.url).configure, parse_arm(arm).settings_at(concurrency))
                cycles[arm].append([await turn(pair, servers[name], loads[name], options) for name in TURNS])
        pair.let_run(*servers.values())
        for load in loads.values():
            await load.end()
    await asyncio.sleep(2)  # the servers notice that their clients have gone
    return cycles


def ratio(cycles: list[list[dict]], key: str) -> tuple[float, float]:
    """After over before (geometric mean) and its standard error."""
    logs = [math.log((c[1][key] + c[3][key]) / (c[0][key] + c[2][key])) for c in cycles]
    error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    return math.exp(statistics.mean(logs)), error


def rows_of(cells: dict[int, dict]) -> list[str]:
    """One line per load and arm."""
    lines = [
        "| clients | arm | ms of a step, after over before | tokens per step | tokens per second | first before over second, ms |",
        "|---|---|---|---|---|---|",
    ]
    for concurrency, arms in cells.items():
        for arm, cycles in arms.items():
            shown = [f"{r:.4f} ± {e:.4f}" for r, e in (ratio(cycles, k) for k in ("ms", "tokens_per_step", "rate"))]
            machine_error = statistics.geometric_mean(c[0]["ms"] / c[2]["ms"] for c in cycles)
            lines.append(f"| {concurrency} | {arm} | {' | '.join(shown)} | {machine_error:.4f} |")
    return lines


def commit_of(checkout: Path) -> str:
    """Short hash of what is checked out there."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def asked_for() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the commit before")
    parser.add_argument("--concurrency", default="1,8")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--arm", action="append", help="as in benchmarks/serving.py; may be given several times")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a turn")
    parser.add_argument("--settle", type=float, default=0.5, help="seconds of a turn whose tokens are not counted")
    parser.add_argument("--fill", type=float, default=4.0, help="seconds in which a server fills its batch")
    parser.add_argument("--cycles", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "benchmarks" / "results" / "commits")
    options = parser.parse_args()
    options.arm = options.arm or ["off", "static-3"]
    return options


def main() -> None:
    options, here = asked_for(), machine()
    said = " ".join("BEFORE" if word == str(options.before) else word for word in sys.argv[1:])
    about = (
        f"`python benchmarks/commits.py {said}`: {commit_of(HERE)} after {commit_of(options.before)}; "
        f"demo pair; {here['cpu']}, {here['cores']} cores, sglang {here['sglang']}, torch {here['torch']}; load average "
        f"before {here['load_average'][0]:.2f}; {time.strftime('%Y-%m-%d')}."
    )
    cells: dict[int, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(
            *(served_from(at, Path(folder) / name) for name, at in (("before", options.before), ("after", HERE)))
        )
        try:
            for concurrency in (int(c) for c in options.concurrency.split(",")):
                cells[concurrency] = asyncio.run(cell(pair, concurrency, options))
                text = "\n".join(["# Two commits in turn", "", about, "", *rows_of(cells), ""])
                options.out.with_suffix(".md").write_text(text)
                options.out.with_suffix(".json").write_text(
                    json.dumps({"about": about, "cells": cells}, indent=1) + "\n"
                )
                print("\n".join(rows_of({concurrency: cells[concurrency]})), flush=True)
        finally:
            pair.close()


if __name__ == "__main__":
    main()
