"""What one piece of tuning is worth: switched on and off inside one running server, neighbouring steps compared.

    python benchmarks/toggles.py [--toggle postponed --toggle compiled] [--concurrency 1,32] [--arm off] [--seconds 120]

A plugin of the engine flips the piece every 32 decode steps, in the order on, off, off, on, and times each step of the
worker; clients never pause. A block is the mean of its steps without the first two; a ratio is taken between neighbouring
blocks of the same number of requests, so neither a slow hour of the machine nor the traffic is in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.serving import COMMON, Prompts
from benchmarks.steady import Load
from sglang_dspark.bench.arms import parse_arm
from sglang_dspark.bench.local import LocalServer, plugin_path, start
from sglang_dspark.bench.receipt import machine
from sglang_dspark.bench.server import Server

HERE = Path(__file__).parents[1]
# What is flipped, as statements over `worker`, `context` and `layers` (modules); `on` says which of the two it shall be.
TOGGLES = {
    "postponed": "context.POSTPONED_STEPS = 16 if on else 1",
    "compiled": "layers._rows_of = rows_of if on else (lambda *given: False)",
}
PLUGIN = """
import json, time

def register():
    from sglang_dspark.cpu.attention import layers
    from sglang_dspark.step import context, worker

    rows_of, inner, steps, times = layers._rows_of, worker.DSparkWorker.step, [0], []

    def step(self, batch, *given):
        place = steps[0] % 32
        on = (steps[0] // 32) % 4 in (0, 3)
        steps[0] += 1
        {toggle}
        began = time.perf_counter()
        result = inner(self, batch, *given)
        if place >= 2:
            times.append((time.perf_counter() - began, len(batch.reqs)))
        if place == 31:
            with open({out!r}, "a") as out:
                out.write(json.dumps([on, times]) + "\\n")
            times.clear()
        return result

    worker.DSparkWorker.step = step
"""


async def load_for(server: LocalServer, concurrency: int, options) -> None:
    """Clients that keep the server busy for the time of one cell."""
    rows = Prompts(400, options.seed).take(400, options.temperature)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        load = Load(server.url, rows)
        load.begin(concurrency, session)
        await asyncio.sleep(options.seconds)
        await load.end()
    await asyncio.sleep(2)  # the server notices that its clients have gone


def blocks_of(lines: list[str], concurrency: int) -> list[tuple[bool, float | None]]:
    """(on, mean seconds of a step) of each block; None where a tenth fewer requests ran in one of its steps."""
    blocks = []
    for line in lines:
        on, times = json.loads(line)
        full = all(requests >= 0.9 * concurrency for _, requests in times)
        blocks.append((on, statistics.mean(seconds for seconds, _ in times) if full else None))
    return blocks


def gain(blocks: list[tuple[bool, float | None]]) -> tuple[float, float, int, float]:
    """Seconds of a step off over on (geometric mean), its standard error, the pairs, and milliseconds of a step on."""
    pairs = [(a, b) for a, b in zip(blocks[::2], blocks[1::2]) if None not in (a[1], b[1])]
    logs = [math.log(b[1] / a[1]) if a[0] else math.log(a[1] / b[1]) for a, b in pairs]
    on = statistics.mean(a[1] if a[0] else b[1] for a, b in pairs)
    return math.exp(statistics.mean(logs)), statistics.stdev(logs) / math.sqrt(len(logs)), len(logs), 1000 * on


def cells_of(toggle: str, options) -> list[str]:
    """Lines of the table for one toggle, every load and arm."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "blocks.jsonl"
        source = PLUGIN.format(toggle=TOGGLES[toggle], out=str(out))
        server = start(Path(folder) / "log", *COMMON, environment=plugin_path(Path(folder), "toggles", source))
        try:
            for concurrency in (int(c) for c in options.concurrency.split(",")):
                for arm in options.arm:
                    Server(server.url).configure(parse_arm(arm).settings_at(concurrency))
                    out.write_text("")
                    asyncio.run(load_for(server, concurrency, options))
                    ratio, error, pairs, on = gain(blocks_of(out.read_text().splitlines(), concurrency))
                    lines.append(
                        f"| {toggle} | {concurrency} | {arm} | {ratio:.4f} ± {error:.4f} | {pairs} | {on:.2f} |"
                    )
                    print(lines[-1], flush=True)
        finally:
            server.stop()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toggle", action="append", choices=TOGGLES)
    parser.add_argument("--concurrency", default="1,32")
    parser.add_argument("--arm", action="append", help="as in benchmarks/serving.py; may be given several times")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=120.0, help="of each cell")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "benchmarks" / "results" / "toggles.md")
    options = parser.parse_args()
    options.arm = options.arm or ["off"]
    here = machine()
    about = (
        f"`python benchmarks/toggles.py {' '.join(sys.argv[1:])}`; demo pair; {here['cpu']}, {here['cores']} cores, sglang "
        f"{here['sglang']}, torch {here['torch']}; load average before {here['load_average'][0]:.2f}; "
        f"{time.strftime('%Y-%m-%d')}."
    )
    lines = [
        "# Tuning, on and off in one server",
        "",
        about,
        "",
        "| piece | clients | arm | seconds of a step, off over on | pairs of blocks | ms of a step, on |",
        "|---|---|---|---|---|---|",
    ]
    for toggle in options.toggle or list(TOGGLES):
        lines += cells_of(toggle, options)
        options.out.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
