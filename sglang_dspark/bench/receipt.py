"""The receipt of a benchmark: the plan before the run, then numbers, tables and pictures that a sceptic can repeat."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from sglang_dspark.bench.bracket import BenchPlan, Cell, plan_to_dict, verdicts

FOOTNOTE = (
    "tokens/step, step and window are the server's own (docs/metrics.md), the generator's warm-up included; "
    "ms/token is the generator's time per output token after the first, median over requests."
)
PLOTS = (("output_throughput", "output tokens per second"), ("median_tpot_ms", "ms per token (median)"))
COLUMNS = (
    ("tokens/s", lambda r: f"{r.load['output_throughput']:.1f}"),
    ("tokens/step", lambda r: _of(r, "tokens_per_step", "{:.2f}")),
    ("step ms", lambda r: _of(r, "step_ms", "{:.1f}")),
    ("window", lambda r: _of(r, "mean_window", "{:.2f}")),
    ("TTFT ms", lambda r: f"{r.load['median_ttft_ms']:.0f}"),
    ("TTFT p99", lambda r: f"{r.load['p99_ttft_ms']:.0f}"),
    ("ms/token", lambda r: f"{r.load['median_tpot_ms']:.1f}"),
    ("ms/token p99", lambda r: f"{r.load['p99_tpot_ms']:.1f}"),
)


def begin(folder: Path, plan: BenchPlan, described: dict) -> Path:
    """Write plan.json (what will be compared, and the bar) before anything runs; returns its path.

    Raises:
        FileExistsError: the folder holds a receipt already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "plan.json"
    with open(path, "x") as out:
        json.dump(
            {
                "plan": plan_to_dict(plan),
                "server": described,
                "machine": machine(),
                "written": _now(),
                "command": command_line(sys.argv[1:]),
            },
            out,
            indent=1,
        )
    return path


def finish(folder: Path, plan: BenchPlan, cells: list[Cell]) -> list[Path]:
    """Write receipt.json, receipt.md and the pictures beside plan.json; returns their paths."""
    before = json.loads((folder / "plan.json").read_text())
    judged = [verdicts(plan, cell) for cell in cells]
    body = {
        **before,
        "finished": _now(),
        "load_average_after": os.getloadavg(),
        "cells": [{**asdict(cell), "verdicts": v} for cell, v in zip(cells, judged)],
    }
    (folder / "receipt.json").write_text(json.dumps(body, indent=1))
    (folder / "receipt.md").write_text(markdown(body, plan, cells, judged))
    return [folder / "receipt.json", folder / "receipt.md", *draw_figures(folder, cells)]


def command_line(arguments: list[str]) -> str:
    """The command as it was given, without the keys in it."""
    words, secret = ["sglang-dspark"], False
    for word in arguments:
        option, equals, _ = word.partition("=")
        hidden = option in ("--api-key", "--admin-api-key")
        words.append("KEY" if secret else f"{option}=KEY" if hidden and equals else word)
        secret = hidden and not equals
    return shlex.join(words)


def machine() -> dict:
    """What was under it, as far as it can be told."""
    names = (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name"))
    model = next(names, "")
    return {
        "system": platform.platform(),
        "cpu": model or platform.machine(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        **{name: version(name) for name in ("sglang", "torch", "sglang-dspark")},
    }


def cautions(plan: BenchPlan) -> list[str]:
    """What these numbers cannot show."""
    arms, said = (plan.control, *plan.treatments), []
    if plan.temperature == 0:
        said.append("Every request is greedy, so the token, block and coupled rules cannot show a difference.")
    if any(arm.url is None and (arm.settings or {}).get("verify_mode") == "off" for arm in arms):
        said.append(
            "`off` was switched on at run time: it decodes plainly but still keeps the draft's KV up to date. "
            "The full control is a server started with --verify-mode off (arm off@URL)."
        )
    if any(arm.schedule for arm in arms):
        said.append("`schedule` takes its length from the number of clients, not from the batch of each step.")
    if any(arm.url for arm in arms):
        said.append(
            "Arms with an address ran on servers of their own, which share the machine's memory and, if busy, "
            "its cores."
        )
    return said


def markdown(body: dict, plan: BenchPlan, cells: list[Cell], judged: list[list[dict]]) -> str:
    """The receipt for people."""
    machine_, server = body["machine"], body["server"]
    lines = [
        "# Benchmark receipt",
        "",
        f"`{body['command']}`",
        "",
        (
            f"{body['written']} to {body['finished']}, {machine_['cpu']}, {machine_['cores']} cores, load average "
            f"{machine_['load_average'][0]:.1f} before and {body['load_average_after'][0]:.1f} after; "
            f"SGLang {machine_['sglang']}, torch {machine_['torch']}, sglang-dspark {machine_['sglang-dspark']}."
        ),
        "",
        (
            f"Target `{server.get('model_path')}`, draft `{server.get('speculative_draft_model_path')}`. "
            f"{plan.requests} requests a run, {plan.output_tokens // 2} to {plan.output_tokens * 3 // 2} tokens each{' at most' * plan.stop_at_end}, "
            f"temperature {plan.temperature}, seed {plan.seed}. "
            "Load generator: `sglang.benchmark.serving`."
        ),
        "",
        f"**Rule, written before the run.** {plan.rule}.",
        "",
    ]
    lines += [f"- {caution}" for caution in cautions(plan)] + [""]
    lines += ["| traffic | clients | arm | gain | controls differ | verdict |", "|---|--:|---|--:|--:|---|"]
    for cell, verdict in zip(cells, judged):
        lines += [
            f"| {cell.traffic} | {cell.concurrency} | {v['arm']} | {v['gain']:+.1%} | {v['spread']:.1%} | "
            f"{v['verdict']} |"
            for v in verdict
        ]
    for cell in cells:
        lines += [
            "",
            f"## {cell.traffic}, {cell.concurrency} clients",
            "",
            "| run | " + " | ".join(name for name, _ in COLUMNS) + " |",
            "|---|" + "--:|" * len(COLUMNS),
        ]
        lines += [f"| {run.arm} | " + " | ".join(read(run) for _, read in COLUMNS) + " |" for run in cell.runs]
    return "\n".join([*lines, "", FOOTNOTE, ""])


def draw_figures(folder: Path, cells: list[Cell]) -> list[Path]:
    """One picture per class: throughput and time per token over the number of clients, a line per arm."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    paths = []
    for traffic in dict.fromkeys(cell.traffic for cell in cells):
        mine = [cell for cell in cells if cell.traffic == traffic]
        figure, axes = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
        for axis, (key, label) in zip(axes, PLOTS):
            for arm in dict.fromkeys(run.arm for cell in mine for run in cell.runs):
                points = [(cell.concurrency, [r.load[key] for r in cell.runs if r.arm == arm]) for cell in mine]
                middle = [sum(values) / len(values) for _, values in points]
                axis.plot([c for c, _ in points], middle, marker="o", label=arm)
                single = [(c, v) for c, values in points for v in values]
                axis.scatter(*zip(*single), s=8, color="grey")
            axis.set(xlabel="clients", ylabel=label, xscale="log", ylim=(0, None), title=traffic)
            axis.set_xticks([c for c, _ in points], [str(c) for c, _ in points])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        axes[0].legend()
        paths.append(folder / f"{traffic}.png")
        figure.savefig(paths[-1], dpi=110)
        plt.close(figure)
    return paths


def _of(run, name: str, form: str) -> str:
    value = None if run.steps is None else run.steps[name]
    return "–" if value is None else form.format(value)


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
