"""What probes cost, and what they mend: the planner under true and false beliefs about a step's cost, simulated.

    python benchmarks/probes.py [--steps 1200] [--warmup 600] [--seeds 2] [--control FILE]

Every scenario is decoded twice: with the true cost and no probes, and with a cost model that learns from a prior, true
or false, and probes. The figure is tokens per second of the second over the first. `--control` adds the figures of
another version of the scheduler on the same scenarios: run this script with its `scheduler` folder first in PYTHONPATH
and `--measure FILE`. Writes benchmarks/results/probes.md and probes.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from datetime import date
from pathlib import Path

import numpy as np

from dspark_scheduler import Acceptance, AdditiveCostModel, Load, Machine, OnlineCostModel, simulate
from dspark_scheduler.contenders import Planned, Setup
from dspark_scheduler.machines import cpu, gpu

RESULTS = Path(__file__).parent / "results"
LOADS = (1, 4, 16, 64, 256)
DEMO = Acceptance(("demo",), auc=0.73, context_auc=0.7)
CASES = {"cpu": (cpu(), DEMO), "gpu": (gpu(), Acceptance()), "gpu, weak draft": (gpu(), DEMO)}


def causal_without_probes(setup: Setup) -> Planned:
    return Planned(setup, "causal", probes=None)


def priors(machine: Machine, load: int) -> dict[str, AdditiveCostModel]:
    """The true cost, and three that a measurement beside other work may have left; in steps of this machine."""
    body, plain = machine.cost.to_dict(), float(machine.cost.step_seconds(load, load, 600.0 * load))
    rows, seconds = (np.array(column) for column in body["theta"])
    dense = np.unique(np.concatenate([rows, [load, load + 1, 2 * load - 1, 2 * load]]))
    dense = dense[dense > 0]
    table = np.asarray(machine.cost.step_seconds(0, dense.astype(int))) - float(machine.cost.step_seconds(0, 1))
    table = np.maximum.accumulate(np.maximum(table + seconds[0], 0.0))

    def believing(theta: np.ndarray) -> AdditiveCostModel:
        return AdditiveCostModel.from_dict({**body, "theta": [dense.tolist(), theta.tolist()]})

    return {
        "true": machine.cost,
        "a step too much from R+1 rows": believing(np.where(dense > load, table + plain, table)),
        "two steps too much from 2R rows": believing(np.where(dense >= 2 * load, table + 2 * plain, table)),
        "rows 40 times too cheap": believing(table[0] + (table - table[0]) / 40),
    }


def measure(options: argparse.Namespace) -> list[dict]:
    """Tokens per second by case, load and prior, means over seeds."""
    rows = []
    for case, (machine, acceptance) in CASES.items():
        for load in LOADS:
            row = {"case": case, "load": load}
            for prior, believed in priors(machine, load).items():
                row[prior] = speed("causal", machine, acceptance, load, options, believed)
            if options.measure is None:
                row["known"] = speed(causal_without_probes, machine, acceptance, load, options, None)
            rows.append(row)
            print(row, flush=True)
    return rows


def speed(
    policy, machine: Machine, acceptance: Acceptance, load: int, options, prior: AdditiveCostModel | None
) -> float:
    """Tokens per second, mean over seeds; `prior` None: the cost is known."""
    runs = [
        simulate(
            policy,
            acceptance,
            machine,
            Load(load),
            steps=options.steps,
            warmup=options.warmup,
            seed=seed,
            noise=0.03,
            believed=None if prior is None else OnlineCostModel(prior),
        )
        for seed in range(options.seeds)
    ]
    return float(np.mean([run.tokens_per_second for run in runs]))


def write(rows: list[dict], control: list[dict] | None, seconds: float, options: argparse.Namespace) -> None:
    """The table as Markdown and JSON, with what it was made by."""
    command = f"python benchmarks/probes.py --steps {options.steps} --warmup {options.warmup} --seeds {options.seeds}"
    about = {"command": command, "date": str(date.today()), "seconds": round(seconds), "machine": platform.machine()}
    about_text = (
        f"`{command}`, {about['date']}, {about['seconds']} s on {about['machine']}, {os.cpu_count()} cores. Tokens per "
        f"second of policy `causal` with an online cost model and probes, over those with the true cost and no probes; "
        f"{options.steps} steps after {options.warmup}, mean of {options.seeds} seeds, step times with 3 % noise. A "
        "*step* is one of plain decoding at that load. In brackets: three clocks instead of the one rule, as of commit "
        "588cb87, on the same scenarios (`--measure` with its scheduler, then `--control`)."
    )
    lines = ["# What probes cost, and what they mend (simulated)", "", about_text, ""]
    beliefs = list(priors(*[cpu(), 1]))
    lines += ["| machine | R | " + " | ".join(beliefs) + " |", "|---" * (len(beliefs) + 2) + "|"]
    for i, row in enumerate(rows):
        cells = [f"{row[prior] / row['known']:.3f}" for prior in beliefs]
        if control is not None:
            cells = [f"{cell} ({control[i][prior] / row['known']:.3f})" for cell, prior in zip(cells, beliefs)]
        lines.append(f"| {row['case']} | {row['load']} | " + " | ".join(cells) + " |")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "probes.md").write_text("\n".join(lines) + "\n")
    (RESULTS / "probes.json").write_text(json.dumps({**about, "rows": rows, "control": control}, indent=1))
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--warmup", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--measure", type=Path, help="write the bare figures there, for a later --control")
    parser.add_argument("--control", type=Path, help="figures that --measure wrote under another version")
    options = parser.parse_args()
    start = time.perf_counter()
    rows = measure(options)
    if options.measure is not None:
        options.measure.write_text(json.dumps(rows))
        return
    write(
        rows,
        None if options.control is None else json.loads(options.control.read_text()),
        time.perf_counter() - start,
        options,
    )


if __name__ == "__main__":
    main()
