"""Every arm in turn under one steady load, a few seconds each: differences that the noise of a sweep's long runs hides.

    python benchmarks/steady.py [--concurrency 1,4,8,16,32] [--temperature 0,1] [--seconds 3] [--cycles 6] [--answers 2]

Two servers with the demo pair, as in benchmarks/serving.py: one started with --verify-mode off (the control: no draft),
one that switches its mode. Each has its own clients, which never pause; the server whose turn it is not is stopped by
SIGSTOP, so it resumes in the middle of its answers and no slice has a start or a drain. A cycle is the control, half of
the arms, the control again, the other half, in an order drawn anew each time; tokens are counted at the clients after
the first --settle seconds. An arm's ratio is taken to the mean of the two controls of the same cycle.

At one client a slice of seconds sees a few answers only, and how many tokens a step commits depends on the text. With
--answers a slice at one client is so many whole answers instead (prefill included, prefix caches emptied before), and
all slices of a cycle answer the same prompts: at temperature 0 every arm then writes the same
text, but for near-ties of bfloat16.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.serving import COMMON, Prompts
from sglang_dspark.bench.arms import parse_arm
from sglang_dspark.bench.local import start
from sglang_dspark.bench.receipt import machine
from sglang_dspark.bench.server import Server
from sglang_dspark.bench.traffic import answer_tokens

ARMS = ("static-1", "static-2", "static-3", "compact+causal", "compact+lagged", "compact+ahead")
CONTROL = "control"
OUTPUT_TOKENS = 128


@dataclass
class Load:
    """Clients that keep one server busy; `tokens` counts what they have received."""

    url: str
    prompts: list[dict]
    tokens: int = 0
    sent: int = 0
    clients: list[asyncio.Task] = field(default_factory=list)

    def begin(self, concurrency: int, session: aiohttp.ClientSession) -> None:
        self.clients = [asyncio.create_task(self._client(session)) for _ in range(concurrency)]

    async def end(self) -> None:
        for client in self.clients:
            client.cancel()
        await asyncio.gather(*self.clients, return_exceptions=True)

    async def _client(self, session: aiohttp.ClientSession) -> None:
        while True:
            index, self.sent = self.sent, self.sent + 1
            await self.ask(session, index)

    async def ask(self, session: aiohttp.ClientSession, index: int) -> None:
        """One answer, its tokens counted as they arrive."""
        body = {
            **self.prompts[index % len(self.prompts)],
            "model": "demo",
            "stream": True,
            "ignore_eos": True,
            "max_tokens": answer_tokens(index, OUTPUT_TOKENS),
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        seen = 0
        async with session.post(self.url + "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                usage = json.loads(line[6:]).get("usage") if line.startswith(b"data: {") else None
                if usage:
                    self.tokens += usage["completion_tokens"] - seen
                    seen = usage["completion_tokens"]


@dataclass
class Pair:
    """The two servers: `control` without a draft, `ours` with one."""

    control: object
    ours: object

    def let_run(self, *running: object) -> None:
        for server in (self.control, self.ours):
            os.killpg(server.process.pid, signal.SIGCONT if server in running else signal.SIGSTOP)

    def close(self) -> None:
        self.let_run(self.control, self.ours)
        for server in (self.control, self.ours):
            server.stop()


async def seconds_of(load: Load, options) -> float:
    """Tokens per second of a load that runs."""
    await asyncio.sleep(options.settle)
    began, tokens = time.perf_counter(), load.tokens
    await asyncio.sleep(options.seconds - options.settle)
    return (load.tokens - tokens) / (time.perf_counter() - began)


async def answers_of(load: Load, session: aiohttp.ClientSession, prompts: range) -> float:
    """Tokens per second of one client that asks these prompts, one after another."""
    await asyncio.to_thread(Server(load.url).flush_cache)
    began, tokens = time.perf_counter(), load.tokens
    for index in prompts:
        await load.ask(session, index)
    return (load.tokens - tokens) / (time.perf_counter() - began)


async def slice_of(pair: Pair, loads: dict, arm: str, concurrency: int, measured) -> dict:
    """What `measured(load)` gives for one arm, and the steps that it took meanwhile."""
    server = pair.control if arm == CONTROL else pair.ours
    pair.let_run(server)
    ours = Server(pair.ours.url)
    if arm != CONTROL:
        await asyncio.to_thread(ours.configure, parse_arm(arm).settings_at(concurrency))
        before = (await asyncio.to_thread(ours.status))[0]
    rate = await measured(loads[server.url])
    if arm == CONTROL:
        return {"rate": rate}
    after = (await asyncio.to_thread(ours.status))[0]
    steps = after["steps"] - before["steps"]
    return {
        "rate": rate,
        "steps": steps,
        "skipped": after["skipped_steps"] - before["skipped_steps"],
        "committed": after["tokens"]["committed"] - before["tokens"]["committed"],
        "verified": after["tokens"]["verified"] - before["tokens"]["verified"],
        "requests": after["mean_requests"] * after["steps"] - before["mean_requests"] * before["steps"],
    }


async def cell(pair: Pair, concurrency: int, temperature: float, options) -> list[dict]:
    """All cycles of one concurrency and temperature: per cycle {arm: [slices]}."""
    rows = Prompts(400, options.seed).take(400, temperature)
    order, cycles = random.Random(f"{options.seed} {concurrency} {temperature}"), []
    timeout = aiohttp.ClientTimeout(total=None, sock_read=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        loads = {server.url: Load(server.url, rows) for server in (pair.control, pair.ours)}
        whole = options.answers if concurrency == 1 else 0
        for server in (pair.control, pair.ours):  # each fills its batch alone
            pair.let_run(server)
            if whole:
                await loads[server.url].ask(session, 0)
                continue
            loads[server.url].begin(concurrency, session)
            await asyncio.sleep(options.fill)
        for number in range(options.cycles):
            measured = partial(seconds_of, options=options)
            if whole:
                measured = partial(answers_of, session=session, prompts=range(number * whole, (number + 1) * whole))
            arms = order.sample(options.arm, len(options.arm))
            half = len(arms) // 2
            cycle: dict[str, list[dict]] = {}
            for arm in [CONTROL, *arms[:half], CONTROL, *arms[half:]]:
                cycle.setdefault(arm, []).append(await slice_of(pair, loads, arm, concurrency, measured))
            cycles.append(cycle)
        pair.let_run(pair.control, pair.ours)
        for load in loads.values():
            await load.end()
    await asyncio.sleep(2)  # the servers notice that their clients have gone
    return cycles


def ratios(cycles: list[dict]) -> dict[str, dict]:
    """Per arm: ratio to the cycle's control (geometric mean), its standard error, tokens per step, drafts per request."""
    table = {}
    for arm in cycles[0]:
        if arm == CONTROL:
            logs = [math.log(c[arm][0]["rate"] / c[arm][1]["rate"]) for c in cycles]
            row = {"rate": statistics.mean(s["rate"] for c in cycles for s in c[arm])}
        else:
            logs = [math.log(c[arm][0]["rate"] / statistics.mean(s["rate"] for s in c[CONTROL])) for c in cycles]
            total = {
                key: sum(c[arm][0][key] for c in cycles)
                for key in ("steps", "skipped", "committed", "verified", "requests")
            }
            row = {
                "tokens_per_step": total["committed"] / total["requests"],
                "window": total["verified"] / total["requests"],
                "resting": total["skipped"] / total["steps"],
            }
        error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
        table[arm] = {"ratio": math.exp(statistics.mean(logs)), "error": error, **row}
    return table


def markdown(cells: list[dict], about: str) -> str:
    """One line per arm, one column per load; below it what the arms did."""
    lines = ["# Arms in turn under a steady load", "", about, ""]
    for temperature in sorted({c["temperature"] for c in cells}):
        mine = [c for c in cells if c["temperature"] == temperature]
        meaning = (
            "Tokens per second over the control's, ± one standard error; in brackets tokens per step, drafts verified "
            "per request and step, and the share of steps at rest."
        )
        lines += [f"## T = {temperature:g}", "", meaning, ""]
        lines += [
            "| arm | " + " | ".join(f"{c['concurrency']} clients" for c in mine) + " |",
            "|---" * (len(mine) + 1) + "|",
        ]
        first = "first control over second (tokens per second)"
        lines.append(
            f"| {first} | "
            + " | ".join(
                f"{t['ratio']:.3f} ± {t['error']:.3f} ({t['rate']:.0f})" for t in (c["table"][CONTROL] for c in mine)
            )
            + " |"
        )
        for arm in (a for a in mine[0]["table"] if a != CONTROL):
            cellsof = (c["table"][arm] for c in mine)
            lines.append(
                f"| {arm} | "
                + " | ".join(
                    f"{t['ratio']:.3f} ± {t['error']:.3f} ({t['tokens_per_step']:.2f}, {t['window']:.1f}, {t['resting']:.0%})"
                    for t in cellsof
                )
                + " |"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="1,4,8,16,32")
    parser.add_argument("--temperature", default="0,1")
    parser.add_argument("--arm", action="append", help="as in benchmarks/serving.py; may be given several times")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a slice")
    parser.add_argument("--settle", type=float, default=0.7, help="seconds of a slice that are not counted")
    parser.add_argument("--fill", type=float, default=4.0, help="seconds in which a server fills its batch")
    parser.add_argument("--cycles", type=int, default=6)
    parser.add_argument(
        "--answers", type=int, default=0, help="at one client: whole answers per slice, the same for all arms"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "steady")
    options = parser.parse_args()
    options.arm = options.arm or list(ARMS)
    here = machine()
    about = (
        f"`python benchmarks/steady.py {' '.join(sys.argv[1:])}`; demo pair; {here['cpu']}, {here['cores']} cores, "
        f"sglang {here['sglang']}, torch {here['torch']}; load average before {here['load_average'][0]:.2f}; "
        f"{time.strftime('%Y-%m-%d')}."
    )
    cells: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(
            *(
                start(Path(folder) / name, *COMMON, "--served-model-name", "demo", *more)
                for name, more in (("control", ("--verify-mode", "off")), ("ours", ()))
            )
        )
        try:
            for temperature in (float(t) for t in options.temperature.split(",")):
                for concurrency in (int(c) for c in options.concurrency.split(",")):
                    cycles = asyncio.run(cell(pair, concurrency, temperature, options))
                    cells.append(
                        {
                            "temperature": temperature,
                            "concurrency": concurrency,
                            "table": ratios(cycles),
                            "cycles": cycles,
                        }
                    )
                    options.out.with_suffix(".json").write_text(
                        json.dumps({"about": about, "cells": cells}, indent=1) + "\n"
                    )
                    options.out.with_suffix(".md").write_text(markdown(cells, about))
                    print(
                        temperature,
                        concurrency,
                        {a: round(t["ratio"], 3) for a, t in cells[-1]["table"].items()},
                        flush=True,
                    )
        finally:
            pair.close()


if __name__ == "__main__":
    main()
