"""`sglang-dspark train-draft`: from a target folder to a DSpark draft with its calibration, tables and model card."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

Opt = typer.Option


def train_draft(
    out: Annotated[Path, Opt(help="Folder of the finished draft.")],
    target: Annotated[Path | None, Opt(help="Target model's folder; without it, the demo target.")] = None,
    work: Annotated[Path | None, Opt(help="Work folder (resumable); default: OUT.work.")] = None,
    settings: Annotated[Path | None, Opt(help="A settings.json of an earlier run; options below override it.")] = None,
    option: Annotated[
        list[str] | None,
        Opt("--set", "-s", help="NAME=VALUE, any setting of sglang_dspark/training/settings.py; repeatable."),
    ] = None,
    prompts: Annotated[Path | None, Opt(help="JSONL of prompts; without it, prompts from packages.")] = None,
    minutes: Annotated[float | None, Opt(help="Training minutes at most.")] = None,
    steps: Annotated[int | None, Opt(help="Training steps at most.")] = None,
    gamma: Annotated[int | None, Opt(help="Drafted tokens a block.")] = None,
    layers: Annotated[int | None, Opt(help="Draft layers.")] = None,
    feature_layers: Annotated[str | None, Opt(help="Target layers whose outputs are read, as 2,14,27.")] = None,
    head: Annotated[str | None, Opt(help="Sequential head: vanilla, gated or rnn.")] = None,
    rank: Annotated[int | None, Opt(help="Rank of the head; 0 trains a DFlash draft.")] = None,
    confidence: Annotated[str | None, Opt(help="Confidence reads: markov, hidden, both, or none.")] = None,
    draft_vocab: Annotated[int | None, Opt(help="Proposable tokens; 0 means all.")] = None,
    shape: Annotated[str | None, Opt(help="Block shape: target or qwen3.")] = None,
    workers: Annotated[int | None, Opt(help="Processes; default: one a core on a CPU, one on a GPU.")] = None,
    device: Annotated[str | None, Opt(help="cpu or cuda; default: cuda where there is one.")] = None,
    dtype: Annotated[str | None, Opt(help="bfloat16 or float32.")] = None,
    seed: Annotated[int | None, Opt(help="Of everything random.")] = None,
    dry_run: Annotated[bool, Opt(help="Say sizes, memory and time, and stop.")] = False,
) -> None:
    """Train a DSpark draft for a target; run the same command again to continue after an interruption."""
    from pydantic import ValidationError

    named = {
        "prompts": str(prompts) if prompts else None,
        "minutes": minutes,
        "steps": steps,
        "gamma": gamma,
        "layers": layers,
        "feature_layers": _numbers(feature_layers),
        "head": head,
        "rank": rank,
        "confidence": confidence,
        "draft_vocab": draft_vocab,
        "shape": shape,
        "workers": workers,
        "device": device,
        "dtype": dtype,
        "seed": seed,
    }
    try:
        run_settings = build_settings(target, settings, option or [], {k: v for k, v in named.items() if v is not None})
        _run(run_settings, work or out.with_name(out.name + ".work"), out, dry_run)
    except ValidationError as error:
        for problem in error.errors():
            typer.echo(f"train-draft: {'.'.join(map(str, problem['loc'])) or 'settings'}: {problem['msg']}", err=True)
        raise typer.Exit(2) from None
    except (ValueError, OSError, RuntimeError) as error:
        typer.echo(f"train-draft: {error}", err=True)
        raise typer.Exit(1) from None


def build_settings(target: Path | None, settings: Path | None, options: list[str], named: dict):
    """TrainSettings from a file, ``--set`` pairs and named options, the later over the earlier."""
    import json

    from sglang_dspark.training.settings import TrainSettings

    values: dict = json.loads(settings.read_text()) if settings else {}
    for pair in options:
        name, found, text = pair.partition("=")
        if not found:
            raise ValueError(f"--set {pair!r} is not NAME=VALUE")
        try:
            values[name] = json.loads(text)
        except json.JSONDecodeError:
            values[name] = text  # a word, like cuda
    values |= named
    if target is not None:
        values["target"] = str(target)
    if "target" not in values:
        from sglang_dspark.demo import ensure_demo_target

        values["target"] = str(ensure_demo_target())
    if not (Path(values["target"]) / "config.json").is_file():
        raise ValueError(f"{values['target']} is no Hugging Face model folder (it has no config.json)")
    if "device" not in values:
        import torch

        values["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    values.setdefault("workers", 1 if values["device"] == "cuda" else len(os.sched_getaffinity(0)))
    return TrainSettings(**values)


def _run(settings, work: Path, out: Path, dry_run: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from sglang_dspark.training.estimate import check_resources
    from sglang_dspark.training.pipeline import Pipeline

    console = Console()
    pipeline = Pipeline(settings, work, out)
    for line in pipeline.estimate.lines():
        console.print(line, highlight=False)
    if dry_run:
        work.parent.mkdir(parents=True, exist_ok=True)
        check_resources(pipeline.estimate, work.parent)
        return
    tables = pipeline.run()
    table = Table("class", *(f"accepted length, {name}" for name in tables["acceptance"]), title=str(out))
    kinds = next(iter(tables["acceptance"].values()))
    for kind in kinds:
        cells = (f"{rows[kind]['length']:.2f}" if kind in rows else "" for rows in tables["acceptance"].values())
        table.add_row(kind, *cells)
    console.print(table)


def _numbers(text: str | None) -> tuple[int, ...] | None:
    """'2,14,27' -> (2, 14, 27); ValueError-free: a bad list becomes a usage error."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of layer numbers like 2,14,27") from None
