"""Mutations of the files that this program reads: every key of a JSON tree with every kind of wrong value, and bad bytes."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 1_000_000, 2**31, 2**63, 10**30, 0.5, -0.5, 1e-300, 1e308,
    float("nan"), float("inf"), float("-inf"), "", "x", "7", "nan", "two\nlines", "\x00", "x" * 5000,
    [], [0], [1, 1], [2, 1], ["0", "2"], [[0], [2]], [None], [True], [float("nan")], [-1], [10**30], {}, {"a": 1}, {"": [{}]},
)  # fmt: skip


def mutations(tree: Any) -> Iterator[tuple[str, Any]]:
    """(what was done, the mutated copy): each node replaced by each value, each key taken away or doubled with another."""
    for place in _places(tree):
        name = ".".join(map(str, place)) or "all of it"
        for value in VALUES:
            yield f"{name} = {value!r:.40}", _with(tree, place, value)
        if place:
            yield f"{name} removed", _without(tree, place)
    if isinstance(tree, dict):
        yield "an unknown key", tree | {"unheard_of": 1}


def bad_bytes(text: bytes, seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """The file cut short, empty, not UTF-8, nested without end, and `count` times with some bytes overwritten."""
    yield "empty", b""
    yield "not UTF-8", b"\xff\xfe" + text
    yield "nested without end", b"[" * 100_000
    yield "a number too long to read", b'{"block_size": ' + b"9" * 5000 + b"}"
    rng = random.Random(seed)
    for number in range(count):
        mutated = bytearray(text[: rng.randrange(len(text))] if number % 3 == 0 else text)
        for _ in range(rng.randrange(4)):
            if mutated:
                mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        yield f"bytes {seed}/{number}", bytes(mutated)


def as_json(tree: Any) -> str:
    return json.dumps(tree)


def _places(tree: Any, at: tuple = ()) -> Iterator[tuple]:
    yield at
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:2]) if isinstance(tree, list) else ()
    for key, value in items:
        yield from _places(value, (*at, key))


def _with(tree: Any, place: tuple, value: Any) -> Any:
    if not place:
        return copy.deepcopy(value)
    tree = copy.deepcopy(tree)
    _parent(tree, place)[place[-1]] = copy.deepcopy(value)
    return tree


def _without(tree: Any, place: tuple) -> Any:
    tree = copy.deepcopy(tree)
    del _parent(tree, place)[place[-1]]
    return tree


def _parent(tree: Any, place: tuple) -> Any:
    for key in place[:-1]:
        tree = tree[key]
    return tree
