"""Hostile requests: one field of a route's body at a time, or several, takes a value that nobody means.

The fields are read from the engine's own models, so a field that a later SGLang adds is attacked without a change here.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.engine.tiny import VOCAB_SIZE

MESSAGES = [{"role": "user", "content": "The river ran"}]
BODIES = {
    "/generate": {"text": "The river ran", "sampling_params": {"max_new_tokens": 2, "temperature": 0}},
    "/v1/completions": {"model": "m", "prompt": "The river ran", "max_tokens": 2},
    "/v1/chat/completions": {"model": "m", "messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"model": "m", "input": "The river ran", "max_output_tokens": 2},
}
VALUES = (
    None, True, False, "", "x", "\ud800", "\x00", "é" * 300, "[", "(a|aa)+$", '{"$ref":"#"}', "file:///etc/passwd",
    0, 1, -1, -5, 5, VOCAB_SIZE, VOCAB_SIZE - 1, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, 2**63, -(2**63) - 1, 10**400,
    0.0, 1.5, -0.5, 1e-30, 1e30, 1e308, float("nan"), float("inf"), float("-inf"),
    [], [None], [0], [-1], [VOCAB_SIZE], [2**63], ["a", ""], [""], [[]], [[5], []], [[[1]]], [1, "a", None], [1.5], [{}],
    {}, {"a": 1}, {"1": float("inf")}, {"-1": 1}, {str(VOCAB_SIZE): 1}, {"a": {"b": {"c": [1, [2]]}}}, {"type": "x"},
    {"dspark": {"max_window": -1}}, {"id": 5}, {"role": "user"}, [{"role": "user"}], [{"role": "user", "content": None}],
)  # fmt: skip


@dataclass(frozen=True)
class Attack:
    """One request: where it goes and its body's bytes; `what` names it in a failure."""

    path: str
    body: bytes
    what: str


def fields_of(path: str) -> list[tuple[str, ...]]:
    """Where a route's body can be changed: keys, and keys inside `sampling_params`."""
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, ResponsesRequest
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    if path == "/generate":
        inner = [("sampling_params", name) for name in SamplingParams.__struct_fields__]
        return [(field.name,) for field in dataclasses.fields(GenerateReqInput)] + inner
    models = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatCompletionRequest}
    return [(name,) for name in models.get(path, ResponsesRequest).model_fields]


def changed(path: str, changes: dict[tuple[str, ...], object]) -> Attack:
    """A route's ordinary body with some fields replaced."""
    body = json.loads(json.dumps(BODIES[path]))
    for place, value in changes.items():
        inside = body
        for key in place[:-1]:
            if not isinstance(inside.get(key), dict):  # another change of this attack took its place
                inside[key] = {}
            inside = inside[key]
        inside[place[-1]] = value
    if path == "/generate" and ("input_ids",) in changes:
        body.pop("text", None)  # the engine reads the text where both are given
    what = ", ".join(f"{'.'.join(place)}={repr(value)[:60]}" for place, value in changes.items())
    return Attack(path, json.dumps(body).encode(), f"{path} {what}")


def malformed(path: str) -> Iterator[Attack]:
    """Bodies that are no object, no JSON, no UTF-8, too deep or too long."""
    good = json.dumps(BODIES[path]).encode()
    for text in (b"", b"[1,2]", b"5", b"null", b'"a"', b"{", good[:-1], good[:-1] + b',"x":\xff\xfe"a"}', b"\xff" * 40):
        yield Attack(path, text, f"{path} body {text[:30]!r}")
    for depth in (900, 100_000):
        yield Attack(path, b"[" * depth + b"]" * depth, f"{path} a list {depth} deep")
        nested = b'{"a":' * depth + b"1" + b"}" * depth
        yield Attack(path, good[:-1] + b',"metadata":' + nested + b"}", f"{path} an object {depth} deep")
    long = "the river " * 1_000_000
    place = {"/generate": "text", "/v1/completions": "prompt", "/v1/responses": "input"}.get(path)
    yield changed(path, {(place,): long} if place else {("messages",): [{"role": "user", "content": long}]})
    if path in ("/generate", "/v1/completions"):
        yield changed(path, {("input_ids" if path == "/generate" else "prompt",): list(range(VOCAB_SIZE)) * 4000})


def attacks(seed: int, count: int) -> list[Attack]:
    """`count` attacks: every field once with a random value, every malformed body, and pairs of fields for the rest."""
    rng = random.Random(seed)
    fields = {path: fields_of(path) for path in BODIES}
    made = [changed(path, {place: rng.choice(VALUES)}) for path, places in fields.items() for place in places]
    while len(made) < count:
        path = rng.choice(list(BODIES))
        chosen = rng.sample(fields[path], rng.choice((1, 1, 2, 3)))
        made.append(changed(path, {place: rng.choice(VALUES) for place in chosen}))
    rng.shuffle(made)
    return made[:count]
