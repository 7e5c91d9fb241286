"""The load sweep of a running server against plain decoding, every window policy and every static length.

    python benchmarks/serving.py [--concurrency 1,4,8,16] [--temperature 1,0] [--seconds 7] [--rounds 1] [--minutes 25]
    python benchmarks/serving.py --resume            # go on where it was interrupted, or add a round with --rounds 2

Starts two servers with the demo pair: one with --verify-mode off, which loads no draft and is the control (`--control
switched` takes the other one's run-time switch instead, and says so), and one that switches its mode between runs. Every
arm runs between two runs of the control (`--between` arms in each gap), on held-out prompts of its own, by SGLang's load
generator. `min_free_slots_delay` and every other server argument are equal. `--also` adds an arm with a server of its own:

    python -m sglang_dspark.bench.dflash sglang_dspark/demo/draft /tmp/dflash
    python benchmarks/serving.py --also 'dflash=--verify-mode static --speculative-draft-model-path /tmp/dflash'

It prints how long it will take, writes --out (JSON, and Markdown beside it) after every run, and stops before a run
that would end after --minutes.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.sweep import Results, Slot, Sweep
from benchmarks.sweep_report import markdown
from sglang_dspark.bench.arms import parse_arm
from sglang_dspark.bench.bracket import run_arm
from sglang_dspark.bench.local import start
from sglang_dspark.bench.receipt import machine
from sglang_dspark.bench.server import Server
from sglang_dspark.bench.traffic import save_rows
from sglang_dspark.prompts.sources import package_prompts

GAMMA = 5
SCHEDULE = "schedule=[[1,3,5],[4,7,2],[8,64,1]]"
ARMS = (
    *(f"static-{k}" for k in range(1, GAMMA + 1)),
    SCHEDULE,
    "compact+causal",
    "compact+lagged",
    "compact+ahead",
    "cap-accept",
)
COMMON = ("--max-running-requests", "64", "--log-level", "error")
CONTROLS = {
    "started": "a server started with --verify-mode off, which loads no draft",
    "switched": "the same server, switched to off at run time: it keeps the draft's KV up to date",
}
CLASSES = ("chat", "code", "math", "prose", "tool")
PILOT_TOKENS = 24
SLOWEST = 1.15  # arms run somewhat longer than the control on average, where fixed lengths are slower
HELD_OUT = 20  # one prompt in so many is kept out of the demo draft's training


class Prompts:
    """Held-out prompts by class in turn; each is given once, and again only when all of a class are used up."""

    def __init__(self, count: int, seed: int) -> None:
        each = max(30, -(-count // len(CLASSES)))  # fewer might leave a class without a held-out one
        found = package_prompts(each * HELD_OUT, seed)
        self.pools = [[prompt for prompt in found[name] if prompt.held_out] for name in CLASSES]
        self.distinct = sum(map(len, self.pools))
        self.next = 0

    def take(self, count: int, temperature: float) -> list[dict]:
        """Rows for the generator; the first is of the first class, so that all runs have the same mixture."""
        turns = -(-count // len(CLASSES))
        rows = []
        for turn in range(self.next, self.next + turns):
            for pool in self.pools:
                messages = [{"role": role, "content": text} for role, text in pool[turn % len(pool)].messages]
                rows.append({"messages": messages, "temperature": temperature})
        self.next += turns
        return rows[:count]


@dataclass
class Bench:
    """The servers and what is needed for a run. `where`: arms that have a server of their own, as NAME@URL."""

    sweep: Sweep
    server: Server
    where: dict[str, str]
    folder: Path

    def run(self, arm: str, rows: list[dict], concurrency: int, tokens: int):
        dataset = self.folder / "prompts.jsonl"
        save_rows(rows, dataset, tokens)
        named = replace(parse_arm(self.where.get(arm, arm)), name=arm)
        return run_arm(named, self.server, dataset, len(rows), concurrency, warmup=0)

    def pilot(self) -> dict:
        """Speed of the control at every load and the seconds that a run costs besides its load; it warms both servers."""
        rates, extra = {}, []
        prompts = Prompts(4 * max(self.sweep.concurrencies), self.sweep.seed + 1000)
        self.run("compact", prompts.take(2 * max(self.sweep.concurrencies), 1.0), max(self.sweep.concurrencies), 48)
        for concurrency in self.sweep.concurrencies:
            began = time.monotonic()
            rows = prompts.take(max(concurrency, 2), self.sweep.temperatures[0])
            load = self.run(self.sweep.control, rows, concurrency, PILOT_TOKENS).load
            rates[str(concurrency)] = load["output_throughput"]
            extra.append(time.monotonic() - began - load["duration"])
        requests = {c: self.sweep.requests(int(c), rate) for c, rate in rates.items()}
        seconds = {
            c: requests[c] * self.sweep.output_tokens / rates[c] * SLOWEST + max(extra[1:] or extra) for c in rates
        }
        return {"tokens_per_second": rates, "requests": requests, "seconds_per_run": seconds}

    def prompts(self, results: Results) -> dict[Slot, list[dict]]:
        """The same prompts for the same slot, however often the sweep was interrupted; every round draws anew."""
        counts, given, distinct = results.body["pilot"]["requests"], {}, []
        for turn in range(self.sweep.rounds):
            slots = [slot for slot in self.sweep.slots() if slot.round == turn]
            needed = sum(counts[str(slot.concurrency)] for slot in slots) + len(CLASSES) * len(slots)
            prompts = Prompts(needed, self.sweep.seed + turn)
            distinct.append(prompts.distinct)
            shared: dict[tuple, list[dict]] = {}
            for slot in slots:
                place = slot.key[:3] if self.sweep.same_prompts else slot.key
                if place not in shared:
                    shared[place] = prompts.take(counts[str(slot.concurrency)], slot.temperature)
                given[slot] = shared[place]
        results.body["prompts"] = f"{min(distinct)} held-out ones a round, of {', '.join(CLASSES)} in turn"
        return given

    def go(self, results: Results, todo: list[Slot], deadline: float) -> bool:
        """Run what is left; False if the deadline came first."""
        pilot = results.body["pilot"]
        left = sum(pilot["seconds_per_run"][str(slot.concurrency)] for slot in todo)
        print(f"{len(todo)} runs, about {left / 60:.1f} minutes", flush=True)
        given = self.prompts(results)
        for number, slot in enumerate(todo, 1):
            if time.monotonic() + pilot["seconds_per_run"][str(slot.concurrency)] > deadline:
                return False
            run = self.run(slot.arm, given[slot], slot.concurrency, self.sweep.output_tokens)
            results.add(slot, run)
            results.path.with_suffix(".md").write_text(markdown(results.body))
            print(
                f"[{number}/{len(todo)}] T={slot.temperature:g} {slot.concurrency} clients {slot.arm}: "
                f"{run.load['output_throughput']:.1f} tokens/s in {run.load['duration']:.1f} s",
                flush=True,
            )
        return True


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--concurrency", default="1,4,8,16")
    parser.add_argument("--temperature", default="1,0", help="in this order")
    parser.add_argument("--seconds", type=float, default=7.0, help="length of a control's run, for its request count")
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--between", type=int, default=2, help="arms between two controls")
    parser.add_argument("--rounds", type=int, default=1, help="the whole sweep so often, with other prompts")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop before a run that would end later than this")
    parser.add_argument("--control", choices=CONTROLS, default="started")
    parser.add_argument("--arm", action="append", help="only these arms")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="NAME=ARGUMENTS",
        help="an arm with a server of its own, started with these arguments",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--same-prompts", action="store_true", help="the same prompts for every arm of a cell")
    parser.add_argument("--resume", action="store_true", help="go on with the file of --out")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/serving.json"))
    parser.add_argument("server", nargs="*", help="more arguments for both servers, after --")
    return parser.parse_args()


def servers_of(options: argparse.Namespace) -> dict[str, list[str]]:
    """Arms that have a server of their own, with its arguments."""
    own = {"off": ["--verify-mode", "off"]} if options.control == "started" else {}
    return own | {name: shlex.split(given) for name, _, given in (text.partition("=") for text in options.also)}


def sweep_of(options: argparse.Namespace, own: dict[str, list[str]]) -> Sweep:
    """The plan; every arm of it can run at every number of clients.

    Raises:
        ArmError: an arm that cannot.
    """
    arms = (*(options.arm or ARMS), *(name for name in own if name != "off"))
    sweep = Sweep(
        "off",
        arms,
        tuple(map(float, options.temperature.split(","))),
        tuple(map(int, options.concurrency.split(","))),
        options.seconds,
        options.output_tokens,
        options.between,
        options.rounds,
        options.seed,
        options.same_prompts,
    )
    for arm in set(sweep.treatments) - set(own):
        [parse_arm(arm).settings_at(concurrency) for concurrency in sweep.concurrencies]
    return sweep


def measure_all(options: argparse.Namespace, results: Results, own: dict[str, list[str]], deadline: float) -> bool:
    """Start the servers and run what is left; False if the deadline came first."""
    servers, todo = [], results.todo()
    with tempfile.TemporaryDirectory(prefix="dspark-sweep-") as folder:
        try:
            for name, given in {"dspark": [], **own}.items():
                servers.append(start(Path(folder) / f"{name}.log", *given, *COMMON, *options.server))
            where = {name: f"{name}@{server.url}" for name, server in zip(own, servers[1:])}
            bench = Bench(results.sweep, Server(servers[0].url), where, Path(folder))
            results.serve(bench.server.describe(), bench.server.status()[0]["fingerprint"])
            results.body["pilot"] = results.body["pilot"] or bench.pilot()
            results.save()
            return bench.go(results, todo, deadline)
        finally:
            for server in servers:
                server.stop()


def main() -> int:
    began, options = time.monotonic(), arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers must not outlive us
    about = {
        "command": shlex.join(["python", *sys.argv]),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "machine": machine() | {"python": platform.python_version()},
        "control": CONTROLS[options.control],
        "also": options.also,
    }
    try:
        own = servers_of(options)
        results = Results(options.out, sweep_of(options, own), about, resume=options.resume)
        if not results.todo():
            print("nothing is left to run")
            return 0
        done = measure_all(options, results, own, began + 60 * options.minutes)
    except ValueError as error:
        sys.exit(f"{error}\nRuns that ended before are in {options.out}; --resume goes on")
    print(
        f"{'finished' if done else 'out of time; go on with --resume'}: {options.out} and .md, "
        f"{(time.monotonic() - began) / 60:.1f} minutes"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
