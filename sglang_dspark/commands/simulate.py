"""`sglang-dspark simulate`: policies under load on paper, with a table and pictures; needs no model and no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dspark_scheduler import Acceptance, Load, Machine, SimulationResult

    Results = dict[str, dict[str, SimulationResult]]  # by load label, then policy

DEFAULT_LOADS, SWEEP_LOADS = "1,4,16,64", "1,2,4,8,16,32,64,128,256"


def simulate(
    machine: Annotated[
        str,
        typer.Option(
            help="'gpu' (an 8B model, staircase costs), 'cpu' (this project's), or a cost file written by `profile`."
        ),
    ] = "gpu",
    domains: Annotated[
        str | None,
        typer.Option(
            help="Acceptance tables: math, code, chat, demo. Default math,code,chat on 'gpu', demo elsewhere."
        ),
    ] = None,
    loads: Annotated[
        str | None, typer.Option(help=f"Requests running at once, comma-separated. Default {DEFAULT_LOADS}.")
    ] = None,
    rates: Annotated[
        str | None, typer.Option(help="Arrivals per second instead (open loop, Poisson), comma-separated.")
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(help="off, static-K, schedule, threshold-X, algorithm1, floor, lagged, causal, ahead, oracle."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Decode steps that count, per policy and load. Default 120; with --sweep 400, more at low loads."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the traffic; every policy of a load meets the same.")] = 0,
    auc: Annotated[float | None, typer.Option(help="How well the confidence head ranks (0.5 to about 0.85).")] = None,
    overconfidence: Annotated[float, typer.Option(help="Factor on the head's logit; 1 is calibrated.")] = 1.3,
    calibrate: Annotated[bool, typer.Option(help="Pass confidence through the online calibrator.")] = True,
    sweep: Annotated[bool, typer.Option(help="Every policy at loads from 1 to 256: about a minute.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the pictures and the table as JSON; none are written without it.")
    ] = None,
) -> None:
    """Decode steps of a loaded server under every window policy: throughput, windows, and the loss to an oracle."""
    import dataclasses

    from dspark_scheduler import Acceptance, all_policies

    chosen = _machine(machine)
    names = tuple((domains or ("math,code,chat" if machine == "gpu" else "demo")).split(","))
    try:
        acceptance = Acceptance(names, overconfidence=overconfidence, **_quality(names, auc))
        wanted = policies.split(",") if policies else all_policies(acceptance.gamma)
        if not (policies or sweep):
            wanted = [name for name in wanted if name.partition("-")[0] not in ("threshold", "lagged", "ahead")]
        traffic = _loads(loads or (SWEEP_LOADS if sweep else DEFAULT_LOADS), rates)
        results = _run(acceptance, chosen, traffic, wanted, steps, sweep, seed, calibrate)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    _print(results, chosen.name)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        described = {"machine": chosen.name, "acceptance": dataclasses.asdict(acceptance), "seed": seed}
        typer.echo(f"wrote {_save(results, described, out)} and {_draw(results, chosen.name, out)}")


def _quality(names: tuple[str, ...], auc: float | None) -> dict[str, float]:
    if auc is not None:
        return {"auc": auc, "context_auc": max(0.51, auc - 0.04)}
    return {"auc": 0.73, "context_auc": 0.70} if "demo" in names else {}  # measured on the trained draft


def _machine(name: str) -> Machine:
    from dspark_scheduler import MACHINES, AdditiveCostModel, Machine
    from dspark_scheduler.fingerprint import load_measurement

    if name in MACHINES:
        return MACHINES[name]()
    if not Path(name).exists():
        raise typer.BadParameter(f"machine {name!r} is neither one of {sorted(MACHINES)} nor a cost file")
    try:
        cost = AdditiveCostModel.from_dict(load_measurement(name, "cost", None))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return Machine(Path(name).stem, cost, "depth", "windows")


def _loads(loads: str, rates: str | None) -> list[Load]:
    from dspark_scheduler import Load

    if rates:
        return [Load(rate=float(rate)) for rate in rates.split(",")]
    return [Load(concurrency=int(load)) for load in loads.split(",")]


def _run(
    acceptance: Acceptance,
    machine: Machine,
    loads: list[Load],
    policies: list[str],
    steps: int | None,
    sweep: bool,
    seed: int,
    calibrate: bool,
) -> Results:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from dspark_scheduler import simulate as run_policy

    results: Results = {load.label: {} for load in loads}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("simulating", total=len(loads) * len(policies))
        for load in loads:
            # Few requests meet few blocks per step: a sweep makes up for it.
            count = steps or (400 * max(1, 8 // (load.concurrency or 8)) if sweep else 120)
            for policy in policies:
                progress.update(task, description=f"load {load.label}, {policy}")
                results[load.label][policy] = run_policy(
                    policy,
                    acceptance,
                    machine,
                    load,
                    steps=count,
                    warmup=max(40, count // 4),
                    seed=seed,
                    calibrate=calibrate,
                )
                progress.advance(task)
    return results


def _print(results: Results, machine: str) -> None:
    from rich.console import Console
    from rich.table import Table

    for load, runs in results.items():
        best = runs["oracle"].tokens_per_second if "oracle" in runs else max(r.tokens_per_second for r in runs.values())
        fixed = [r.tokens_per_second for name, r in runs.items() if name.startswith(("static", "off"))]
        table = Table(title=f"{machine}, load {load}: {next(iter(runs.values())).running:.0f} requests running")
        for title in ("policy", "tokens/s", "per user", "accepted", "window", "ms/step", "no draft", "regret"):
            table.add_column(title, justify="left" if title == "policy" else "right", no_wrap=True)
        for name, r in runs.items():
            style = "bold" if name == "causal" else "green" if fixed and r.tokens_per_second == max(fixed) else None
            table.add_row(
                name,
                f"{r.tokens_per_second:,.0f}",
                f"{r.tokens_per_user:.1f}",
                f"{r.accepted_length:.2f}",
                f"{r.mean_window:.2f}",
                f"{1000 * r.step_seconds:.2f}",
                f"{r.skipped:.0%}",
                f"{1 - r.tokens_per_second / best:.1%}",
                style=style,
            )
        Console().print(table)


def _save(results: Results, described: dict, out: Path) -> Path:
    import dataclasses
    import json

    rows = [
        {
            **{k: v for k, v in dataclasses.asdict(r).items() if k not in ("load", "windows", "budgets")},
            "load": load,
            "windows": r.windows.round(4).tolist(),
        }
        for load, runs in results.items()
        for r in runs.values()
    ]
    path = out / f"simulate_{described['machine']}.json"
    path.write_text(json.dumps({**described, "results": rows}, indent=1))
    return path


def _draw(results: Results, machine: str, out: Path) -> Path:
    """One picture: throughput against `off`, windows and accepted length, users against throughput, regret."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(13, 9), constrained_layout=True)
    labels, policies = list(results), list(next(iter(results.values())))
    _draw_lines(axes[0, 0], results, policies, "tokens_per_second", relative="off")
    axes[0, 0].set_ylabel("tokens per second, times plain decoding")
    _draw_windows(axes[0, 1], results, "causal" if "causal" in policies else policies[-1])
    for policy in policies:
        runs = [results[label][policy] for label in labels]
        axes[1, 0].plot([r.tokens_per_user for r in runs], [r.tokens_per_second for r in runs], **_look(policy))
    axes[1, 0].set(xlabel="tokens per second for one user", ylabel="tokens per second of the server", yscale="log")
    _draw_lines(axes[1, 1], results, [p for p in policies if p != "off"], "tokens_per_second", relative="oracle")
    axes[1, 1].set_ylabel("tokens per second, times the oracle")
    for axis in (axes[0, 0], axes[0, 1], axes[1, 1]):
        axis.set_xlabel("load")
    axes[0, 0].legend(fontsize=8, ncol=2)
    figure.suptitle(f"Window policies under load ({machine}); grey: every fixed length")
    path = out / f"simulate_{machine}.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _draw_lines(axis, results: Results, policies: list[str], name: str, relative: str) -> None:
    labels = list(results)
    for policy in policies:
        values = []
        for label in labels:
            runs = results[label]
            base = getattr(runs[relative], name) if relative in runs else max(getattr(r, name) for r in runs.values())
            values.append(getattr(runs[policy], name) / base)
        axis.plot(range(len(labels)), values, **_look(policy))
        if policy.startswith("static"):
            axis.annotate(
                policy[7:],
                (len(labels) - 1, values[-1]),
                fontsize=8,
                color="grey",
                xytext=(4, -3),
                textcoords="offset points",
            )
    axis.set_xticks(range(len(labels)), labels)
    axis.grid(alpha=0.3)


def _draw_windows(axis, results: Results, policy: str) -> None:
    """Share of each window by load as stacked bars; accepted length and mean window above them."""
    import matplotlib.pyplot as plt
    import numpy as np

    runs = [runs[policy] for runs in results.values()]
    shares = np.array([r.windows for r in runs])
    colours = plt.colormaps["viridis"](np.linspace(0.95, 0.1, shares.shape[1]))
    bottom = np.zeros(len(runs))
    for window, colour in enumerate(colours):
        axis.bar(range(len(runs)), shares[:, window], bottom=bottom, color=colour, label=f"{window}", width=0.7)
        bottom += shares[:, window]
    axis.set(ylabel=f"share of windows under {policy}", ylim=(0, 1))
    axis.set_xticks(range(len(runs)), list(results))
    axis.legend(title="verified", fontsize=8, loc="lower left", bbox_to_anchor=(1.13, 0.25))
    twin = axis.twinx()
    twin.plot(range(len(runs)), [r.accepted_length for r in runs], "ko-", label="accepted length")
    twin.plot(range(len(runs)), [1 + r.mean_window for r in runs], "ks--", label="rows verified")
    twin.set_ylim(bottom=0)
    twin.set_ylabel("per request and step")
    twin.legend(fontsize=8, loc="lower right")


def _look(policy: str) -> dict:
    kind = policy.partition("-")[0]
    look = {
        "off": {"color": "black", "linestyle": ":"},
        "static": {"color": "lightgrey", "linewidth": 1},
        "schedule": {"color": "tab:brown"},
        "threshold": {"color": "tab:olive"},
        "algorithm1": {"color": "tab:purple"},
        "floor": {"color": "tab:orange"},
        "lagged": {"color": "tab:cyan"},
        "ahead": {"color": "tab:green"},
        "causal": {"color": "tab:red", "linewidth": 2.5},
        "oracle": {"color": "black", "linestyle": "--"},
    }[kind]
    return look if kind == "static" else {**look, "label": policy, "marker": ".", "zorder": 3}
