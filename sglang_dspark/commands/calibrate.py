"""`sglang-dspark calibrate`: fit the draft's confidence on prompts, offline (sequential temperature scaling)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def calibrate(
    ctx: typer.Context,
    prompts: Annotated[Path, typer.Argument(help='JSONL: {"prompt": "..."} or {"messages": [...]} per line.')],
    out: Annotated[Path, typer.Option(help="Where to write the calibration file (for --calibration).")] = Path(
        "sts.json"
    ),
    tokens: Annotated[int, typer.Option(help="Tokens generated per prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="Temperature that is served.")] = 1.0,
    objective: Annotated[str, typer.Option(help="ece (the paper's) or nll.")] = "ece",
) -> None:
    """Verify whole blocks of real answers, fit one temperature per position, and report the error before and after."""
    import tempfile

    import numpy as np

    from dspark_scheduler import Fingerprint, SequentialTemperatureScaling
    from sglang_dspark.commands.offline_engine import arguments_of, measured_engine, status_of_first_rank

    texts = read_prompts(prompts)
    record = Path(tempfile.mkdtemp()) / "outcomes.npz"
    with measured_engine(arguments_of(ctx), verify_mode="static", calibration="off", record=str(record)) as engine:
        texts = [
            text
            if isinstance(text, str)
            else engine.tokenizer_manager.tokenizer.apply_chat_template(
                text, tokenize=False, add_generation_prompt=True
            )
            for text in texts
        ]
        engine.generate(texts, {"temperature": temperature, "max_new_tokens": tokens})
        status = status_of_first_rank(engine)  # asking writes what was recorded
    with np.load(record) as outcomes:
        scaling = SequentialTemperatureScaling.fit(
            outcomes["logits"], outcomes["acceptance"], outcomes["observed"], objective=objective
        )
    scaling.save(out, Fingerprint(**status["fingerprint"]))
    report(scaling)
    typer.echo(f"wrote {out}; serve with --calibration {out}")


def read_prompts(path: Path) -> list:
    """Prompts of a JSONL file: strings, or lists of chat messages.

    Raises:
        typer.BadParameter: an unreadable file, or a line without `prompt` or `messages`.
    """
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except (OSError, json.JSONDecodeError) as error:
        raise typer.BadParameter(f"{path}: {error}") from error
    wanted = [line.get("messages") or line.get("prompt") for line in lines]
    if not wanted or not all(wanted):
        raise typer.BadParameter(f'{path}: every line needs "prompt" or "messages"')
    return wanted


def report(scaling) -> None:
    """Print temperatures and errors by position."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="confidence by position")
    for column in ("position", "blocks", "temperature", "ECE before", "ECE after"):
        table.add_column(column, justify="right")
    for k, (t, n, a, b) in enumerate(zip(scaling.temperatures, scaling.samples, scaling.ece_before, scaling.ece_after)):
        table.add_row(str(k + 1), str(n), f"{t:.3f}", f"{a:.3f}", f"{b:.3f}")
    Console().print(table)
