"""Requests by class of traffic, as the rows that SGLang's load generator reads (its dataset `openai`)."""

from __future__ import annotations

import json
import random
from pathlib import Path

CLASSES = ("chat", "prose", "code", "math", "tool", "structured", "shell")
_TAGS = {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5}
_FIELDS = {"name": {"type": "string", "maxLength": 40}, "count": {"type": "integer"}, "tags": _TAGS}
_SCHEMA = {"type": "object", "properties": _FIELDS, "required": ["name", "count", "tags"]}
_THINGS = ("bridges", "letters", "birds", "recipes", "tools", "rivers", "songs", "stations", "books", "coins")
_TASKS = (
    "list every file over {n} MB under {d}",
    "count the lines of all .{e} files under {d}",
    "show the {n} newest files in {d}",
    "replace every tab by {n} spaces in the .{e} files of {d}",
    "find .{e} files changed in the last {n} days in {d}",
    "make an archive of {d} without its .{e} files",
    "print the {n} largest folders below {d}",
)


def traffic(
    classes: list[str], count: int, seed: int, temperature: float, file: Path | None = None
) -> dict[str, list[dict]]:
    """`count` requests of each class: chat messages, and what the class adds (a schema for `structured`).

    Args:
        classes: of CLASSES; with a file, of the classes that it holds.
        count: requests of each class; a source with fewer is repeated.
        seed: of the choice; the same seed gives the same requests.
        temperature: of every request.
        file: JSONL of {"class": ..., "messages": [...]} (as `train-draft` reads), instead of the built-in sources.

    Raises:
        ValueError: a class that is unknown or empty.
    """
    rng = random.Random(seed)
    pools = _from_file(file) if file else _built_in(count, seed, rng)
    rows = {}
    for name in classes:
        if not pools.get(name):
            known = sorted(kind for kind, pool in pools.items() if pool)
            raise ValueError(f"no prompts of class {name!r}: there are {', '.join(known)}")
        pool = list(pools[name])
        rng.shuffle(pool)
        rows[name] = [{**pool[i % len(pool)], "temperature": temperature} for i in range(count)]
    return rows


def save_rows(rows: list[dict], path: Path, output_tokens: int) -> None:
    """Write the generator's JSONL: answers of half to one and a half times `output_tokens`, which is their mean.

    With answers of one length plain decoding runs in lock-step: all end in the same step and are replaced in one prefill,
    which no users do, and which drafting breaks up (measured: 10 to 15 % of the tokens per second at 16 clients).
    """
    lines = ({**row, "max_tokens": answer_tokens(i, output_tokens)} for i, row in enumerate(rows))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def answer_tokens(index: int, mean: int) -> int:
    """Tokens of the `index`-th answer: half to one and a half times `mean`."""
    return round(mean * (0.5 + _spread(index)))


def _spread(index: int) -> float:
    """In [0, 1), evenly over any run of neighbours (multiples of the golden ratio)."""
    return (0.5 + index * 0.6180339887498949) % 1.0


def _from_file(file: Path) -> dict[str, list[dict]]:
    from sglang_dspark.prompts.prompts import load_prompts

    pools: dict[str, list[dict]] = {}
    for prompt in load_prompts(file):
        pools.setdefault(prompt.kind, []).append(_row(prompt.messages))
    return pools


def _built_in(count: int, seed: int, rng: random.Random) -> dict[str, list[dict]]:
    from sglang_dspark.prompts.sources import package_prompts

    prompts = package_prompts(count, seed)
    pools = {kind: [_row(prompt.messages) for prompt in found] for kind, found in prompts.items()}
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA}}
    collections = [
        f"Invent a collection of {thing} (number {i}) and describe it as JSON."
        for i, thing in enumerate(rng.choices(_THINGS, k=count))
    ]
    pools["structured"] = [{**_row((("user", text),)), "response_format": schema} for text in collections]
    commands = [f"Write one shell command that does this, and explain it: {_task(rng)}." for _ in range(count)]
    pools["shell"] = [_row((("user", text),)) for text in commands]
    return pools


def _task(rng: random.Random) -> str:
    return rng.choice(_TASKS).format(
        n=rng.randint(2, 500),
        d=rng.choice(("/var/log", "~/projects", "/srv/data", ".")),
        e=rng.choice(("py", "txt", "log", "md", "json")),
    )


def _row(messages) -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in messages]}
