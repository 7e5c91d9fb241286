"""Host time of planning a step: ours against SGLang 0.5.23's own planner, on the same survival, in one process.

    python benchmarks/planner.py [--gamma 7] [--rounds 40]

Ours counts everything from raw confidence to windows: survival, budget, allocation. SGLang's counts
`compute_verify_token_budget` alone (its survival and its allocation come on top, on the device), with its
one-dimensional and its additive table. CPU time of the one thread they run on, so that a neighbour on the machine does
not count; arms are interleaved round by round and the median over the rounds is kept. Writes
benchmarks/results/planner.md and planner.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np

from dspark_scheduler import (
    POLICIES,
    DraftShape,
    LaggedSurvival,
    OnlineCalibrator,
    OnlineCostModel,
    Planner,
    Terms,
    allocate_windows,
    plan_budget,
    survival,
)
from dspark_scheduler.machines import gpu

REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
RESULTS = Path(__file__).parent / "results"


def sglang_arms(values: np.ndarray, cost) -> dict[str, Callable[[], object]]:
    """SGLang's planner with either of its tables, made from the same costs at the token counts it captures."""
    warnings.filterwarnings("ignore")
    import torch
    from sglang.srt.speculative.dspark_components.dspark_planner import (
        DSparkScheduleConfig,
        compute_verify_token_budget,
    )
    from sglang.srt.speculative.dspark_components.dspark_sps import SpsAdditiveCostTable, SpsCostTable

    torch.set_num_threads(1)
    gamma = values.shape[1]
    sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    tokens = [size * (gamma + 1) for size in sizes]
    seconds = [float(cost.step_seconds(size, m)) for size, m in zip(sizes, tokens)]
    flat = SpsCostTable(tokens, [1 / s for s in seconds], tokens[-1])
    alpha, theta = np.interp(sizes, *cost.alpha).tolist(), np.interp(tokens, *cost.theta).tolist()
    additive = SpsAdditiveCostTable(cost.t0, sizes, alpha, tokens, theta)
    # Row by row in memory, as its own relay hands survival out; ours lies position by position.
    config, old = DSparkScheduleConfig(gamma=gamma), torch.from_numpy(np.ascontiguousarray(values))

    def arm(table):
        return lambda: compute_verify_token_budget(history_survival_probs=old, sps_table=table, cfg=config)

    return {"sglang, 1-D table": arm(flat), "sglang, additive table": arm(additive)}


def our_arms(confidence: np.ndarray, cost) -> dict[str, Callable[[], object]]:
    """Each part alone, and all of a step."""
    values = survival(confidence)
    evidence = LaggedSurvival(values[None], 0, 2)
    requests, gamma = values.shape
    shape = DraftShape("block", gamma)

    def budget():
        return plan_budget(evidence, Terms.of(cost, shape, requests), values[0])

    def step():
        now = survival(confidence)
        return allocate_windows(now, budget().tokens)

    tokens = budget().tokens
    return {
        "survival": lambda: survival(confidence),
        "budget": budget,
        "windows": lambda: allocate_windows(values, tokens),
        "ours, all three": step,
    }


def median_microseconds(arms: dict[str, Callable[[], object]], rounds: int, calls: int = 20) -> dict[str, float]:
    """Median over rounds of the mean of `calls` calls; every round runs every arm."""
    seen: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, call in arms.items():
            start = time.thread_time()
            for _ in range(calls):
                call()
            seen[name].append((time.thread_time() - start) / calls * 1e6)
    return {name: statistics.median(times) for name, times in seen.items()}


def whole_step(requests: int, gamma: int, steps: int = 400) -> dict[str, float]:
    """A Planner as the worker drives it, and the two learners, microseconds per step (means over `steps`)."""
    rng = np.random.default_rng(0)
    cost, calibrator = OnlineCostModel(gpu().cost), OnlineCalibrator(gamma)
    planner = Planner(gamma, cost, POLICIES["causal"], drafting="block")
    low, high = np.zeros(requests, np.int64), np.full(requests, gamma)
    ids = tuple((slot, 0) for slot in range(requests))
    confidence = rng.beta(6, 2, (requests, gamma)).astype(np.float32)
    logits, outcome = np.log(confidence / (1 - confidence)), rng.random((requests, gamma)) < confidence
    observed = np.cumprod(np.column_stack([np.ones(requests), outcome[:, :-1]]), axis=1) > 0
    spent = dict.fromkeys(("plan and publish", "learn the cost", "learn the calibration"), 0.0)
    for step in range(steps):
        marks = [time.thread_time()]
        plan = planner.plan(step, ids, 1000.0 * requests, low, high)
        now = survival(confidence)
        if not plan.skip_draft:
            planner.policy.windows(plan, now)
            planner.publish(step, ids, now)
        marks.append(time.thread_time())
        seconds, length = 0.01 * rng.uniform(0.9, 1.1), planner.shape.run(plan.draft_length)
        block = cost.block_seconds(requests, length) if length else None
        cost.observe(
            requests,
            requests + plan.tokens,
            1000.0 * requests,
            seconds + (block or 0.0),
            slots=requests * length,
            length=length,
            block_seconds=block,
        )
        marks.append(time.thread_time())
        calibrator.observe(logits, outcome, observed)
        calibrator.end_step()
        marks.append(time.thread_time())
        for name, begin, end in zip(spent, marks, marks[1:]):
            spent[name] += (end - begin) * 1e6 / steps
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gamma", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    cost, rng, rows = gpu().cost, np.random.default_rng(0), []
    for requests in REQUESTS:
        confidence = rng.beta(6, 2, (requests, options.gamma)).astype(np.float32)
        times = median_microseconds(
            {**our_arms(confidence, cost), **sglang_arms(survival(confidence), cost)}, options.rounds
        )
        times.update(whole_step(requests, options.gamma))
        rows.append({"requests": requests, **{name: round(value, 1) for name, value in times.items()}})
        print(rows[-1], flush=True)
    write(rows, options)


def write(rows: list[dict], options: argparse.Namespace) -> None:
    """The table as Markdown and JSON, with what it was measured on."""
    about = {
        "command": f"python benchmarks/planner.py --gamma {options.gamma} --rounds {options.rounds}",
        "date": str(date.today()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}",
        "gamma": options.gamma,
    }
    columns = {
        "R": lambda r: r["requests"],
        "survival": lambda r: r["survival"],
        "budget": lambda r: r["budget"],
        "windows": lambda r: r["windows"],
        "ours, all three": lambda r: r["ours, all three"],
        "SGLang 1-D": lambda r: r["sglang, 1-D table"],
        "SGLang additive": lambda r: r["sglang, additive table"],
        "÷ 1-D": lambda r: f"{r['ours, all three'] / r['sglang, 1-D table']:.2f}",
        "÷ additive": lambda r: f"{r['ours, all three'] / r['sglang, additive table']:.2f}",
        "budget ÷ 1-D": lambda r: f"{r['budget'] / r['sglang, 1-D table']:.2f}",
        "budget ÷ additive": lambda r: f"{r['budget'] / r['sglang, additive table']:.2f}",
        "plan and publish": lambda r: f"{r['plan and publish']:.0f}",
        "learn cost": lambda r: f"{r['learn the cost']:.0f}",
        "learn calibration": lambda r: f"{r['learn the calibration']:.0f}",
    }
    about_text = (
        f"`{about['command']}`, {about['machine']} (AMD EPYC), {about['date']}. Median of {options.rounds} rounds of "
        "20 calls, arms interleaved; CPU time of the one thread. *ours, all three* goes from confidence to windows. "
        "SGLang 0.5.23's figure is `compute_verify_token_budget` on the same survival alone (its survival and "
        "allocation are not in it), with its one-dimensional table and with its additive one, the same kind of model "
        "as ours. The last three columns are means of a `Planner` driven as a worker drives it (relay, running mean, "
        "probing included) and of its two learners."
    )
    lines = ["# Host time of planning a step, microseconds", "", about_text, ""]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(read(row)) for read in columns.values()) + " |" for row in rows]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "planner.md").write_text("\n".join(lines) + "\n")
    (RESULTS / "planner.json").write_text(json.dumps({**about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
