"""The plan and its execution: every treatment between two runs of the control, and the verdict by a bar set before."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from sglang_dspark.bench.arms import Arm
from sglang_dspark.bench.server import Server, run_load
from sglang_dspark.bench.traffic import save_rows
from sglang_dspark.settings.config import SWITCHABLE


@dataclass(frozen=True)
class BenchPlan:
    """What will be run and what will count, written down before anything runs.

    Args:
        control, treatments: arms. bar: least relative gain of output tokens per second that counts as one.
        classes, concurrencies: every pair is a cell. requests: per run. output_tokens: per request, in the mean.
        temperature, seed: of the traffic. stop_at_end: whether an answer may end before `output_tokens`.

    Raises:
        ValueError: nothing to compare, a number that is not positive, or an arm that cannot run at a concurrency.
    """

    control: Arm
    treatments: tuple[Arm, ...]
    classes: tuple[str, ...]
    concurrencies: tuple[int, ...]
    requests: int = 32
    output_tokens: int = 128
    temperature: float = 1.0
    bar: float = 0.03
    seed: int = 1
    stop_at_end: bool = False

    def __post_init__(self) -> None:
        if not (self.treatments and self.classes and self.concurrencies):
            raise ValueError("a benchmark needs a treatment, a class of traffic and a concurrency")
        if min(self.requests, self.output_tokens - 3, *self.concurrencies) < 1 or self.bar <= 0:
            raise ValueError("requests, concurrency and the bar must be positive, and answers at least 4 tokens long")
        if any(self.requests < c for c in self.concurrencies):
            most = max(self.concurrencies)
            raise ValueError(f"{self.requests} requests cannot keep {most} clients busy: raise --requests")
        for arm in (self.control, *self.treatments):
            for clients in self.concurrencies:
                arm.settings_at(clients)

    @property
    def rule(self) -> str:
        """The verdict's rule in words."""
        return (
            f"faster: output tokens per second at least {self.bar:.1%} above the mean of the two controls around "
            "it, and by more than those two differ; slower: the same below; undecided otherwise"
        )


@dataclass
class Run:
    """One run: what the clients saw (`load`), and what the server's status gained (`steps`, None without one)."""

    arm: str
    load: dict
    steps: dict | None
    started: float


@dataclass
class Cell:
    """All runs of one class and concurrency: control, treatment, control, treatment, ..., control."""

    traffic: str
    concurrency: int
    runs: list[Run] = field(default_factory=list)


def execute(plan: BenchPlan, rows: dict[str, list[dict]], server: Server, tell: Callable[[str], None]) -> list[Cell]:
    """Run every cell; the server's own settings are put back at the end, whatever happens."""
    before = server.status()
    cells = []
    try:
        with tempfile.TemporaryDirectory(prefix="dspark-bench-") as folder:
            for traffic in plan.classes:
                dataset = Path(folder) / f"{traffic}.jsonl"
                save_rows(rows[traffic], dataset, plan.output_tokens)
                for concurrency in plan.concurrencies:
                    cells.append(_cell(plan, Cell(traffic, concurrency), dataset, server, tell))
    finally:
        if before:
            server.configure({name: before[0]["config"][name] for name in SWITCHABLE})
    return cells


def _cell(plan: BenchPlan, cell: Cell, dataset: Path, server: Server, tell) -> Cell:
    order = [plan.control]
    for treatment in plan.treatments:
        order += [treatment, plan.control]
    for arm in order:
        run = _run(plan, arm, cell.concurrency, dataset, server)
        tell(f"{cell.traffic}, {cell.concurrency} clients, {arm.name}: {run.load['output_throughput']:.1f} tokens/s")
        cell.runs.append(run)
    return cell


def _run(plan: BenchPlan, arm: Arm, concurrency: int, dataset: Path, server: Server) -> Run:
    return run_arm(arm, server, dataset, plan.requests, concurrency, stop_at_end=plan.stop_at_end)


def run_arm(arm: Arm, server: Server, dataset: Path, requests: int, concurrency: int, **how) -> Run:
    """One run of one arm: its settings, an empty prefix cache, the load (`how` goes to `run_load`), the steps it took.

    Raises:
        ServerError: the server refused the settings, or requests failed.
    """
    where = replace(server, url=arm.url) if arm.url else server
    settings = arm.settings_at(concurrency)
    if settings is not None:
        where.configure(settings)
    where.flush_cache()
    started, before = time.time(), where.status()
    load = run_load(where, dataset, requests, concurrency, **{"stop_at_end": False, **how})
    return Run(arm.name, load, gained(before, where.status()), started)


def gained(before: list[dict] | None, after: list[dict] | None) -> dict | None:
    """Step figures of a run, over all ranks, from the status before and after it (the generator's warm-up included).

    `draft_ms` (backbone and head), `verify_ms`, `accept_ms` (acceptance and the draft's KV of what it kept) and `host_ms`
    (planning, packing, bookkeeping) are means over all steps; `step_ms`, the engine's part included, over those that
    another step followed at once.
    """
    if not before or not after:
        return None

    def gain(read) -> float:
        return sum(read(b) for b in after) - sum(read(a) for a in before)

    steps, requests, timed = gain(lambda s: s["steps"]), gain(lambda s: s["requests"]), gain(lambda s: s["timed_steps"])
    verified = gain(lambda s: s["tokens"]["verified"])
    windows = [gain(lambda s, w=w: s["windows"][w]) for w in range(len(after[0]["windows"]))]
    if not steps:
        return None

    def part_ms(*names: str) -> float:
        return 1000 * gain(lambda s: sum(s["seconds"][name] for name in names)) / steps

    return {
        "steps": steps,
        "mean_requests": requests / steps,
        "tokens_per_step": gain(lambda s: s["tokens"]["committed"]) / requests,
        "step_ms": 1000 * gain(lambda s: s["seconds"]["step"]) / timed if timed else None,
        "predicted_step_ms": 1000 * gain(lambda s: s["predicted_seconds"]) / timed if timed else None,
        "draft_ms": part_ms("backbone", "draft"),
        "verify_ms": part_ms("verify"),
        "accept_ms": part_ms("accept", "commit"),
        "host_ms": part_ms("host"),
        "mean_window": verified / requests,
        "acceptance_rate": gain(lambda s: s["tokens"]["accepted"]) / verified if verified else None,
        "skipped": gain(lambda s: s["skipped_steps"]) / steps,
        "windows": windows,
    }


def verdicts(plan: BenchPlan, cell: Cell) -> list[dict]:
    """For every treatment of a cell: its gain over its two controls, how far those differ, and the verdict."""
    judged = []
    for place in range(1, len(cell.runs), 2):
        first, run, second = cell.runs[place - 1 : place + 2]
        a, b, a2 = (r.load["output_throughput"] for r in (first, run, second))
        mean = (a + a2) / 2
        gain, spread = b / mean - 1, abs(a2 - a) / mean
        word = "undecided" if abs(gain) < plan.bar or abs(gain) <= spread else "faster" if gain > 0 else "slower"
        judged.append({"arm": run.arm, "gain": gain, "spread": spread, "verdict": word})
    return judged


def plan_to_dict(plan: BenchPlan) -> dict:
    """JSON-ready, the rule included."""
    return {**asdict(plan), "rule": plan.rule}
