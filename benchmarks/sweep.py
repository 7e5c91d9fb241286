"""A sweep over loads, temperatures and arms that may be interrupted: its order, its file, and what it says.

A *cell* is one temperature and number of clients in one round: controls, with `between` treatments in each gap. Every run
has prompts of its own, of the same classes in the same order, or with `same_prompts` every run of a cell has the same.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from sglang_dspark.bench.bracket import Run
from sglang_dspark.errors import UserError

MEANS = (
    "tokens_per_step",
    "mean_window",
    "step_ms",
    "draft_ms",
    "verify_ms",
    "accept_ms",
    "host_ms",
    "acceptance_rate",
    "skipped",
)
LOADS = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "p99_itl_ms")


class SweepError(UserError):
    """A sweep that cannot go on; the message says why."""


@dataclass(frozen=True)
class Slot:
    """One run of the plan. `place` counts within its cell from 0; `control` runs at both ends and between."""

    round: int
    temperature: float
    concurrency: int
    place: int
    arm: str

    @property
    def key(self) -> tuple:
        return self.round, self.temperature, self.concurrency, self.place


@dataclass(frozen=True)
class Sweep:
    """What will run.

    Args:
        control, treatments: arms as on the command line, without the addresses that change from start to start.
        temperatures, concurrencies: every pair is a cell of each round.
        seconds: aim for the length of a run of the control, from which the number of requests is derived.
        output_tokens: per request, in the mean. between: treatments between two controls. rounds: how often, with other prompts.
        seed: of prompts and of the order of treatments, which differs from cell to cell.
        same_prompts: all runs of a cell get the same ones (less spread in a short run, and not what users send).

    Raises:
        ValueError: nothing to compare, or a number that is not positive.
    """

    control: str
    treatments: tuple[str, ...]
    temperatures: tuple[float, ...]
    concurrencies: tuple[int, ...]
    seconds: float = 8.0
    output_tokens: int = 64
    between: int = 2
    rounds: int = 1
    seed: int = 1
    same_prompts: bool = False

    def __post_init__(self) -> None:
        if not (self.treatments and self.temperatures and self.concurrencies):
            raise ValueError("a sweep needs a treatment, a temperature and a concurrency")
        if min(self.seconds, self.output_tokens - 3, self.between, self.rounds, *self.concurrencies) <= 0:
            raise ValueError("seconds, tokens (at least 4), gaps, rounds and concurrencies must be positive")
        if self.control in self.treatments or len(set(self.treatments)) < len(self.treatments):
            raise ValueError("every arm may be named once")

    def slots(self) -> list[Slot]:
        """All runs in order: a round's cells one after another, so that an interrupted sweep holds whole cells."""
        found = []
        for turn in range(self.rounds):
            for temperature in self.temperatures:
                for concurrency in self.concurrencies:
                    order = list(self.treatments)
                    random.Random(f"{self.seed} {turn} {temperature} {concurrency}").shuffle(order)
                    names = [self.control]
                    for start in range(0, len(order), self.between):
                        names += [*order[start : start + self.between], self.control]
                    found += [Slot(turn, temperature, concurrency, i, name) for i, name in enumerate(names)]
        return found

    def requests(self, concurrency: int, rate: float) -> int:
        """Requests of a run: whole turns of all clients that fill `seconds` at `rate` output tokens per second."""
        turns = self.seconds * rate / (self.output_tokens * concurrency)
        return concurrency * max(1, round(turns))


class Results:
    """The file of a sweep: plan, pilot and every finished run; written whole, in one move, after each run."""

    def __init__(self, path: Path, sweep: Sweep, about: dict, *, resume: bool) -> None:
        """Start a file, or with `resume` go on with one.

        Raises:
            SweepError: the file exists and `resume` is off, or it is the file of another plan.
        """
        self.path, self.sweep = path, sweep
        plan = json.loads(json.dumps(asdict(sweep)))
        self.body = {"plan": plan, **about, "pilot": {}, "runs": []}
        if not path.exists():
            return
        if not resume:
            raise SweepError(f"{path} exists: go on with it by --resume, or name another file with --out")
        self.body = json.loads(path.read_text())
        old = self.body["plan"]
        # More rounds may follow a finished sweep; everything else would mix what cannot be compared.
        differ = [name for name in plan if name != "rounds" and plan[name] != old.get(name)]
        differ += [] if self.body["control"] == about["control"] else ["kind of control"]
        differ += [] if self.body.get("also", []) == about.get("also", []) else ["servers of other arms"]
        if differ:
            raise SweepError(f"{path} was made with another plan: {', '.join(differ)}")
        old["rounds"] = max(old["rounds"], plan["rounds"])
        self.body.setdefault("resumed", []).append(about)

    def serve(self, server: dict, fingerprint: dict) -> None:
        """Note what is served.

        Raises:
            SweepError: the runs in the file are of another target, draft, engine or machine.
        """
        before = self.body.setdefault("fingerprint", fingerprint)
        if differ := [name for name in fingerprint if fingerprint[name] != before.get(name)]:
            raise SweepError(f"{self.path} was measured with another {', '.join(differ)}")
        self.body["server"] = server

    def todo(self) -> list[Slot]:
        """Runs that are not in the file. An unfinished cell starts again: its controls must stand beside its arms."""
        cells: dict[tuple, list[Slot]] = {}
        for slot in self.sweep.slots():
            cells.setdefault(slot.key[:3], []).append(slot)
        done = {run_key(run) for run in self.body["runs"]}
        left = {cell: slots for cell, slots in cells.items() if not all(slot.key in done for slot in slots)}
        self.body["runs"] = [run for run in self.body["runs"] if run_key(run)[:3] not in left]
        return [slot for slots in left.values() for slot in slots]

    def add(self, slot: Slot, run: Run) -> None:
        self.body["runs"].append(
            {
                **asdict(slot),
                "load": run.load,
                "steps": run.steps,
                "started": run.started,
                "load_average": os.getloadavg()[0],
            }
        )
        self.save()

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.body, indent=1))
        part.replace(self.path)


def run_key(run: dict) -> tuple:
    """The slot's key of a run in the file."""
    return run["round"], run["temperature"], run["concurrency"], run["place"]


def judged(runs: list[dict], control: str) -> list[dict]:
    """Every treatment that stands between two controls, with its `ratio` to their mean and their `spread`.

    The ratio is of output tokens per second; the spread is |A2 - A| over that mean. A treatment whose second control is
    missing (the sweep was interrupted) is not judged.
    """
    found, before, waiting = [], None, []
    for run in sorted(runs, key=run_key):
        if before is not None and run_key(run)[:3] != run_key(before)[:3]:
            before, waiting = None, []
        if run["arm"] != control:
            waiting += [run] if before is not None else []
            continue
        if before is not None:
            a, a2 = before["load"]["output_throughput"], run["load"]["output_throughput"]
            base = (a + a2) / 2
            found += [
                {**one, "ratio": one["load"]["output_throughput"] / base, "spread": abs(a2 - a) / base}
                for one in waiting
            ]
        before, waiting = run, []
    return found


def summary(runs: list[dict], control: str) -> list[dict]:
    """One row per temperature, concurrency and arm: means over rounds, and the range of its ratios and control spreads."""
    ratios: dict[tuple, list[dict]] = {}
    for one in judged(runs, control):
        ratios.setdefault((one["temperature"], one["concurrency"], one["arm"]), []).append(one)
    rows = []
    for key in dict.fromkeys((r["temperature"], r["concurrency"], r["arm"]) for r in runs):
        mine = [r for r in runs if (r["temperature"], r["concurrency"], r["arm"]) == key]
        bracketed = ratios.get(key, [])
        row = {
            "temperature": key[0],
            "concurrency": key[1],
            "arm": key[2],
            "runs": len(mine),
            "ratios": [r["ratio"] for r in bracketed],
            "spread": max((r["spread"] for r in bracketed), default=None),
        }
        row |= {name: mean(r["load"][name] for r in mine) for name in LOADS}
        for name in MEANS:
            seen = [r["steps"][name] for r in mine if r["steps"] and r["steps"][name] is not None]
            row[name] = mean(seen) if seen else None
        if key[2] == control:
            speeds = [r["load"]["output_throughput"] for r in mine]
            row["spread"] = (max(speeds) - min(speeds)) / mean(speeds)
        rows.append(row)
    return rows
