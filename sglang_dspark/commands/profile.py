"""`sglang-dspark profile`: measure this machine's step times with a real engine and write a cost file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def profile(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(help="Where to write the cost file (for --cost-model).")] = Path("cost.json"),
) -> None:
    """Time target and draft over requests and rows; takes serve's flags (model, draft, dtype, tp). About 15 s."""
    import shutil

    from sglang_dspark.commands.offline_engine import arguments_of, measured_engine, status_of_first_rank

    with measured_engine(arguments_of(ctx), verify_mode="compact", cost_model="measure") as engine:
        status = status_of_first_rank(engine)
    shutil.copyfile(Path(status["state_folder"]) / "cost.json", out)
    report(out, status["gamma"])
    typer.echo(f"wrote {out}; serve with --cost-model {out}")


def report(path: Path, gamma: int) -> None:
    """Print what a cost file says of verifying 0..gamma drafts per request at several loads."""
    from rich.console import Console
    from rich.table import Table

    from dspark_scheduler import AdditiveCostModel

    cost = AdditiveCostModel.load(path, None)
    table = Table(title="milliseconds of a step, by requests and drafts verified of each; and of its draft")
    for column in ("requests", *map(str, range(gamma + 1)), "draft"):
        table.add_column(column, justify="right")
    for requests in (1, 2, 4, 8, 16, 32):
        steps = [1000 * float(cost.step_seconds(requests, requests * (1 + w))) for w in range(gamma + 1)]
        draft = 1000 * float(cost.draft_seconds(requests, requests * gamma, gamma))
        table.add_row(str(requests), *(f"{ms:.1f}" for ms in (*steps, draft)))
    Console().print(table)
