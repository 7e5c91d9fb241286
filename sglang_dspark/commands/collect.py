"""`sglang-dspark collect`: a running server answers prompts; the token ids are kept, for `train-draft --set answered=FOLDER`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Opt = typer.Option


def collect(
    out: Annotated[Path, Opt(help="Folder of the files of answers; what they hold is not asked again.")],
    url: Annotated[str, Opt(help="Server of the target, plain or speculative.")] = "http://127.0.0.1:30000",
    target: Annotated[
        Path | None, Opt(help="Target model's folder (its tokenizer); without it, the demo target.")
    ] = None,
    prompts: Annotated[Path | None, Opt(help="JSONL of prompts; without it, prompts from packages.")] = None,
    count: Annotated[int, Opt(min=1, help="Prompts from packages.")] = 10_000,
    weight: Annotated[
        list[str] | None, Opt(help="CLASS=NUMBER: share of a class among the packages' prompts; others count 1.")
    ] = None,
    tokens: Annotated[int | None, Opt(min=1, help="Stop when the folder holds so many answered tokens.")] = None,
    at_once: Annotated[int, Opt(min=1, help="Requests under way.")] = 64,
    max_prompt: Annotated[int, Opt(min=1, help="Longer prompts are left out.")] = 512,
    max_new: Annotated[int, Opt(min=8, help="Tokens of an answer at most.")] = 256,
    file_tokens: Annotated[int, Opt(min=100, help="Answered tokens of a file.")] = 200_000,
    greedy_share: Annotated[
        float, Opt(min=0, max=1, help="Of the packages' prompts, answered at temperature 0.")
    ] = 0.15,
    seed: Annotated[int, Opt(help="Of the choice of prompts; a folder belongs to one.")] = 0,
) -> None:
    """Let a running server answer prompts and keep the token ids; run it again to continue."""
    from rich.console import Console
    from rich.progress import Progress
    from transformers import AutoTokenizer

    from sglang_dspark.demo import ensure_demo_target
    from sglang_dspark.prompts.prompts import load_prompts
    from sglang_dspark.training.collect import Collector

    target = target or ensure_demo_target()
    try:
        chosen = (
            load_prompts(prompts) if prompts else _package_prompts(count, seed, greedy_share, _numbers(weight or []))
        )
        tokenizer = AutoTokenizer.from_pretrained(target)
        sizes = {"at_once": at_once, "max_prompt": max_prompt, "max_new": max_new, "file_tokens": file_tokens}
        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task("answered tokens", total=tokens or len(chosen) * max_new)
            collector = Collector(url.rstrip("/"), tokenizer, target.name, out, **sizes)
            answered = collector.run(chosen, tokens, lambda done: bar.update(task, completed=done))
    except (ValueError, OSError, RuntimeError) as error:
        typer.echo(f"collect: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{out} holds {answered} answered tokens")


def _package_prompts(count: int, seed: int, greedy_share: float, weights: dict[str, float]):
    """Prompts to train on (not the held-out ones) out of packages, mixed by weight."""
    from sglang_dspark.prompts.prompts import KINDS, mix
    from sglang_dspark.prompts.sources import package_prompts

    if unknown := sorted(set(weights) - set(KINDS)):
        raise ValueError(f"--weight {unknown[0]}: no such class; there are {', '.join(KINDS[:-1])}")
    largest = max(weights.values(), default=1.0) / (len(KINDS) - 1)
    sources = package_prompts(int(count * max(largest, 0.25)) + 200, seed)
    train = {kind: [prompt for prompt in found if not prompt.held_out] for kind, found in sources.items()}
    return mix(train, count, seed, greedy_share, weights)


def _numbers(pairs: list[str]) -> dict[str, float]:
    """['chat=2'] -> {'chat': 2.0}."""
    weights = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        try:
            weights[name] = float(text)
        except ValueError:
            raise ValueError(f"--weight {pair!r} is not CLASS=NUMBER, like chat=2") from None
        if not 0 <= weights[name] < float("inf"):
            raise ValueError(f"--weight {pair}: the number must be 0 or more")
    return weights
