"""What a stream says of a tool call does not depend on how its text is cut into pieces.

Bug class: a parser that makes one event of each piece, so that of several tokens that arrive at once the text before a
call is lost, or the call behind a call. Plain decoding sends a token a piece, a speculating server several.
"""

from __future__ import annotations

import json
import random
import re
from importlib import import_module

import pytest
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.json_array_parser import JsonArrayParser

from sglang_dspark.repairs.tool_streams import HOOKS

TOOLS = [Tool(function=Function(name=name, parameters={"type": "object"})) for name in ("add", "sub")]
CALLS = [("add", {"n": 12, "of": ["a", "[b]"]}), ("sub", {}), ("add", {"deep": {"er": "Grüße\n"}})]
BODIES = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in CALLS]
TEXTS = {
    "qwen25": "Let me see: 1 < 2.\n\n" + "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in BODIES),
    "llama3": "Let me see.\n<|python_tag|>" + "; ".join(BODIES),
    "json": "\n [" + ", ".join(BODIES) + "]",
}


@pytest.fixture(autouse=True)
def mended(monkeypatch):
    for hook in HOOKS:
        module, _, path = hook.path.partition(":")
        name, method = path.split(".")
        owner = getattr(import_module(module), name)
        monkeypatch.setattr(owner, method, wrapped(hook.function, getattr(owner, method)))


def wrapped(hook, original):
    return lambda *args, **kwargs: hook(original, *args, **kwargs)


def said(parser: str, pieces: list[str]) -> tuple[str, list[list[str]]]:
    """All text of a stream, and of each call its name and arguments."""
    reading = JsonArrayParser() if parser == "json" else FunctionCallParser(TOOLS, parser)
    text, calls = "", {}
    for piece in pieces:
        if parser == "json":
            found = reading.parse_streaming_increment(piece, TOOLS)
            further, items = found.normal_text, found.calls
        else:
            further, items = reading.parse_stream_chunk(piece)
        text += further
        for item in items:
            call = calls.setdefault(item.tool_index, ["", ""])
            call[0] += item.name or ""
            call[1] += item.parameters
    return text, list(calls.values())


def cut(text: str, rng: random.Random, longest: int) -> list[str]:
    pieces = []
    while text:
        length = rng.randint(1, longest)
        pieces.append(text[:length])
        text = text[length:]
    return pieces


@pytest.mark.parametrize("parser", TEXTS)
def test_a_stream_says_the_same_however_it_is_cut(parser):
    rng, whole = random.Random(5), TEXTS[parser]
    text, calls = said(parser, list(whole))
    assert [(name, json.loads(arguments)) for name, arguments in calls] == CALLS
    assert text.startswith(whole[: re.search(r"<tool_call>|<\|python_tag\|>|\[", whole).start()])
    for longest in (3, 12, 40, len(whole)):
        for _ in range(40):
            pieces = cut(whole, rng, longest)
            assert said(parser, pieces) == (text, calls), pieces


def test_text_without_a_call_passes():
    assert said("qwen25", ["1 <", " 2 <to", "ol> [", "]"]) == ("1 < 2 <tool> []", [])
