"""Quality of planning: every policy on the same traffic and the same costs, simulated.

    python benchmarks/policies.py [--steps 300] [--seeds 2]

SGLang's planner is its own code (`compute_verify_token_budget` of the installed 0.5.23), given the true costs in both
of its table formats, survival two steps old with ones for new requests, and the same calibrated confidence as ours.
Machines: a GPU with fine tiers, the same GPU with tiers only at powers of two times the block (as SGLang captures
them), and this project's CPU. Writes benchmarks/results/policies.md and policies.json; a target that is missed is
marked there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
from rich.progress import track

from dspark_scheduler import (
    Acceptance,
    Load,
    Machine,
    SurvivalRelay,
    allocate_windows,
    simulate,
    survival,
)
from dspark_scheduler.contenders import Decision, Setup, View
from dspark_scheduler.machines import cpu, gpu

RESULTS = Path(__file__).parent / "results"
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class SGLangPlanner:
    """SGLang 0.5.23's budget on lagged survival, spent by this step's; it always drafts."""

    reads = "tokens"

    def __init__(self, setup: Setup, additive: bool) -> None:
        import torch
        from sglang.srt.speculative.dspark_components import dspark_planner, dspark_sps

        torch.set_num_threads(1)
        self._tensor, self._plan = torch.from_numpy, dspark_planner.compute_verify_token_budget
        self._config = dspark_planner.DSparkScheduleConfig(gamma=setup.gamma)
        self.gamma, self.relay, cost = setup.gamma, SurvivalRelay(max_age=2), setup.machine.cost
        sizes, tokens = np.array(SIZES), np.array(SIZES) * (setup.gamma + 1)
        draft = cost.draft_seconds(sizes, sizes * setup.gamma, setup.gamma)
        if additive:  # the draft goes into α: it is a function of R here
            probes = sorted({*cost.tiers, *tokens.tolist()})
            theta = cost.step_seconds(1, np.array(probes)) - float(cost.step_seconds(1, 1))
            alpha = cost.step_seconds(sizes, 1) - float(cost.step_seconds(1, 1)) + draft
            bias = float(cost.step_seconds(1, 1))
            self.table = dspark_sps.SpsAdditiveCostTable(bias, sizes.tolist(), alpha.tolist(), probes, theta.tolist())
        else:
            seconds = cost.step_seconds(sizes, tokens) + draft
            self.table = dspark_sps.SpsCostTable(tokens.tolist(), (1 / seconds).tolist(), int(tokens[-1]))

    def decide(self, view: View) -> Decision:
        now = survival(view.confidence)
        old = self.relay.read(view.step, view.ids, self.gamma)
        self.relay.publish(view.step, view.ids, now)
        history = self._tensor(np.ascontiguousarray(old.filled(np.ones(self.gamma))[0]))
        budget = self._plan(history_survival_probs=history, sps_table=self.table, cfg=self._config).budget
        return Decision(allocate_windows(now, budget), len(view.ids) * self.gamma, self.gamma)

    def told(self, requests, tokens, context, seconds, slots, length) -> None:
        """Learns nothing."""


def sglang_1d(setup: Setup) -> SGLangPlanner:
    return SGLangPlanner(setup, additive=False)


def sglang_additive(setup: Setup) -> SGLangPlanner:
    return SGLangPlanner(setup, additive=True)


def jagged() -> Machine:
    """The GPU with SGLang's tiers: 8 tokens times 1, 2, 4, ... requests, nothing between."""
    c = gpu().cost
    tiers = tuple(8 * size for size in SIZES)
    return Machine("gpu-jagged", replace(c, tiers=tiers), "block", "block")


CASES = (
    (gpu, Acceptance(), (1, 4, 16, 32, 64, 128, 256)),
    (jagged, Acceptance(), (1, 3, 6, 12, 24, 48, 96, 192)),
    (cpu, Acceptance(("demo",), auc=0.73, context_auc=0.70), (1, 2, 4, 8, 16, 32)),
)


def run_case(machine: Machine, acceptance: Acceptance, loads: tuple[int, ...], steps: int, seeds: int) -> list[dict]:
    """Tokens per second by load and policy, mean over seeds."""
    fixed = ["off", *(f"static-{k}" for k in range(1, acceptance.gamma + 1))]
    policies = [
        *fixed,
        "schedule",
        "threshold-0.6",
        "algorithm1",
        sglang_1d,
        sglang_additive,
        "lagged",
        "causal",
        "ahead",
        "oracle",
    ]
    rows = []
    for load in track(loads, description=machine.name):
        row = {"machine": machine.name, "load": load}
        for policy in policies:
            runs = [simulate(policy, acceptance, machine, Load(load), steps=steps, seed=seed) for seed in range(seeds)]
            row[runs[0].policy] = float(np.mean([run.tokens_per_second for run in runs]))
        row["best static"] = max(fixed, key=row.get)
        rows.append(row)
    return rows


def verdict(row: dict) -> list[str]:
    """The targets that this load misses, in words. Above 0.995 counts as equal: seeds differ by more than the rest."""
    targets = {"sglang_1d": 0.995, "sglang_additive": 0.995, row["best static"]: 0.995, "oracle": 0.98}
    return [
        f"{row['causal'] / row[name]:.3f} of {name}"
        for name, share in targets.items()
        if row["causal"] < share * row[name]
    ]


def _columns() -> dict[str, Callable[[dict], str]]:
    """Titles of the table and how each cell is read from a row."""

    def speed(policy: str) -> Callable[[dict], str]:
        return lambda row: f"{row[policy]:,.0f}" if row[policy] > 1000 else f"{row[policy]:.1f}"

    def ratio(policy: str) -> Callable[[dict], str]:
        return lambda row: f"{row['causal'] / row[policy]:.3f}"

    def best(row: dict) -> str:
        return f"{row[row['best static']]:,.1f} ({row['best static'].removeprefix('static-')})"

    return {
        "load": lambda row: str(row["load"]),
        "off": speed("off"),
        "best static": best,
        "schedule": speed("schedule"),
        "threshold 0.6": speed("threshold-0.6"),
        "Algorithm 1": speed("algorithm1"),
        "SGLang 1-D": speed("sglang_1d"),
        "SGLang additive": speed("sglang_additive"),
        "lagged": speed("lagged"),
        "**causal**": speed("causal"),
        "ahead": speed("ahead"),
        "oracle": speed("oracle"),
        "÷ best static": lambda row: f"{row['causal'] / row[row['best static']]:.3f}",
        "÷ SGLang 1-D": ratio("sglang_1d"),
        "÷ SGLang additive": ratio("sglang_additive"),
        "÷ oracle": ratio("oracle"),
        "missed": lambda row: "; ".join(verdict(row)) or "—",
    }


def write(rows: list[dict], seconds: float, options: argparse.Namespace) -> None:
    """The tables as Markdown and JSON, with what they were made by."""
    command = f"python benchmarks/policies.py --steps {options.steps} --seeds {options.seeds}"
    about = {
        "command": command,
        "date": str(date.today()),
        "seconds": round(seconds),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    about_text = (
        f"`{command}`, {about['date']}, {about['seconds']} s on {about['machine']} (AMD EPYC). Mean of {options.seeds} "
        f"seeds of {options.steps} steps; every policy meets the same traffic. Costs are those of "
        "`dspark_scheduler.machines` and known to every planner; confidence comes from one kind of head (overconfident "
        "by 1.3, calibrated online). SGLang: its own `compute_verify_token_budget` (0.5.23). The oracle knows this "
        "step's survival. Ratios are `causal` over the other."
    )
    lines = ["# Policies on the same traffic and costs, simulated tokens per second", "", about_text, ""]
    columns = _columns()
    for name in dict.fromkeys(row["machine"] for row in rows):
        lines += [f"## {name}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        mine = [row for row in rows if row["machine"] == name]
        lines += ["| " + " | ".join(read(row) for read in columns.values()) + " |" for row in mine] + [""]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "policies.md").write_text("\n".join(lines))
    (RESULTS / "policies.json").write_text(json.dumps({**about, "rows": rows}, indent=1))
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    start, rows = time.perf_counter(), []
    for make, acceptance, loads in CASES:
        rows += run_case(make(), acceptance, loads, options.steps, options.seeds)
    write(rows, time.perf_counter() - start, options)


if __name__ == "__main__":
    main()
