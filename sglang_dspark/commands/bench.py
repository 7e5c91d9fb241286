"""`sglang-dspark bench`: measure a running server with controls around every treatment, and write a receipt."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

UrlOption = Annotated[str, typer.Option(help="The running server.")]
ControlOption = Annotated[str, typer.Option(help="The arm before and after every treatment.")]
ArmOption = Annotated[
    list[str] | None,
    typer.Option(
        help="A treatment; may be repeated: off, static, static-K, compact, cap-accept, schedule=[[1,4,5],[5,8,3]]; MODE+RULE, MODE+POLICY, MODE+max-K; NAME@URL for another server. Default: compact."
    ),
]
TrafficOption = Annotated[
    str, typer.Option(help="Classes, comma-separated: chat, prose, code, math, tool, structured, shell; or 'all'.")
]
PromptsOption = Annotated[
    Path | None, typer.Option(help='JSONL of {"class", "messages"} instead of the built-in prompts.')
]
ConcurrencyOption = Annotated[str, typer.Option(help="Numbers of clients, comma-separated.")]
RequestsOption = Annotated[int, typer.Option(help="Requests of a run.")]
OutputTokensOption = Annotated[
    int, typer.Option(help="Tokens of an answer in the mean; they differ from half to one and a half of it.")
]
TemperatureOption = Annotated[float, typer.Option(help="Of every request; at 0 the acceptance rules cannot show.")]
StopAtEndOption = Annotated[
    bool, typer.Option("--stop-at-end", help="Let answers end by themselves; fair only with equal texts.")
]
BarOption = Annotated[
    float, typer.Option(help="Least gain in output tokens per second that counts, written down before the run.")
]
SeedOption = Annotated[int, typer.Option(help="Of the choice of prompts.")]
OutOption = Annotated[
    Path | None, typer.Option(help="Folder for the receipt; a new one under bench-receipts by default.")
]
ApiKeyOption = Annotated[str | None, typer.Option(help="The server's --api-key.")]
AdminApiKeyOption = Annotated[str | None, typer.Option(help="The server's --admin-api-key, to switch modes.")]
TokenizerOption = Annotated[
    str | None,
    typer.Option(help="Folder of the tokenizer, where the server's own path is not on this machine. No hub is asked."),
]


def bench(
    url: UrlOption = "http://127.0.0.1:30000",
    control: ControlOption = "off",
    arm: ArmOption = None,
    traffic: TrafficOption = "chat",
    prompts: PromptsOption = None,
    concurrency: ConcurrencyOption = "1,8",
    requests: RequestsOption = 32,
    output_tokens: OutputTokensOption = 128,
    temperature: TemperatureOption = 1.0,
    stop_at_end: StopAtEndOption = False,
    bar: BarOption = 0.03,
    seed: SeedOption = 1,
    out: OutOption = None,
    api_key: ApiKeyOption = None,
    admin_api_key: AdminApiKeyOption = None,
    tokenizer: TokenizerOption = None,
) -> None:
    """Tokens per step, step time, time to first token, time per token and throughput of modes that bracket each other."""
    from sglang_dspark.bench import bracket, receipt
    from sglang_dspark.bench import traffic as sources
    from sglang_dspark.bench.arms import parse_arm
    from sglang_dspark.bench.server import Server
    from sglang_dspark.errors import UserError

    try:
        classes = tuple(sources.CLASSES if traffic == "all" else traffic.split(","))
        plan = bracket.BenchPlan(
            parse_arm(control),
            tuple(parse_arm(text) for text in arm or ["compact"]),
            classes,
            tuple(int(c) for c in concurrency.split(",")),
            requests,
            output_tokens,
            temperature,
            bar,
            seed,
            stop_at_end,
        )
        rows = sources.traffic(list(classes), requests, seed, temperature, prompts)
        server = Server(url.rstrip("/"), api_key, admin_api_key, tokenizer)
        server.tokenizer_path()
        folder = out or Path("bench-receipts") / time.strftime("%Y%m%d-%H%M%S")
        written = receipt.begin(folder, plan, server.describe())
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"plan written to {written}; {plan.rule}")
    for caution in receipt.cautions(plan):
        typer.echo(f"note: {caution}")
    try:
        cells = bracket.execute(plan, rows, server, lambda line: typer.echo(f"  {line}"))
    except UserError as error:
        typer.echo(f"sglang-dspark bench: {error}", err=True)
        raise typer.Exit(1) from error
    files = receipt.finish(folder, plan, cells)
    show(plan, cells)
    typer.echo("wrote " + ", ".join(map(str, files)))


def show(plan, cells) -> None:
    """Print every run and every verdict."""
    from rich.console import Console
    from rich.table import Table

    from sglang_dspark.bench.bracket import verdicts
    from sglang_dspark.bench.receipt import COLUMNS

    console = Console()
    if not console.is_terminal:
        console.width = 120  # a log or a pipe has no edge to fit into
    for cell in cells:
        table = Table(title=f"{cell.traffic}, {cell.concurrency} clients")
        for title in ("run", *(name for name, _ in COLUMNS)):
            table.add_column(title, justify="left" if title == "run" else "right", no_wrap=True)
        for run in cell.runs:
            table.add_row(run.arm, *(read(run) for _, read in COLUMNS))
        console.print(table)
        for v in verdicts(plan, cell):
            console.print(
                f"{v['arm']}: {v['gain']:+.1%} against controls that differ by {v['spread']:.1%}: [bold]{v['verdict']}[/bold]"
            )
