"""What a body may be: how long, how many items, and that it can be read at all.

The engine's request models look into a body before they know that it is an object, so a list, or an object where a list
belongs, ends there in a TypeError, which FastAPI takes for a fault of the server. While a body is read, every error is
about the body. Of a list whose items are wrong, pydantic reports every one, for every type that it might have been: a
message of a conversation costs up to 180 kB and a millisecond in which nobody is answered (measured 2026-12-01, pydantic
2.14.4), so 60 kB of `[1, 1, ...]` took 3.5 GB. Such lists are counted before they are validated.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from itertools import chain

READERS = ("request_body_to_args", "request_params_to_args")  # FastAPI's functions that turn a request into arguments
ERRORS = (TypeError, AttributeError, KeyError, IndexError, RecursionError, OverflowError)

ROUTES = ("/generate", "/encode", "/classify", "/v1/", "/api/", "/invocations", "/vertex_generate")
RECORDINGS = "/v1/audio/"  # these are files, not JSON
LEAST_BYTES = 32 << 20
BYTES_PER_TOKEN = 64  # of one prompt as long as the context; a token is seldom over 16 characters, one at most 6 bytes
PICTURES = 16  # times as much where a body may carry pictures
MOST_TURNS = 2048  # messages of a conversation with all their parts and calls
MOST_ITEMS = 1 << 16  # of any other field
# Fields that hold one kind of plain data, as long as you like: its items cost nothing where they are of that kind.
NUMBERS, TEXTS, WEIGHTS = {int}, {str}, {int, float}
DATA = {
    "text": (TEXTS,),
    "prompt": (TEXTS, NUMBERS),
    "input": (TEXTS, NUMBERS),
    "input_ids": (NUMBERS,),
    "context": (NUMBERS,),
    "token_ids_logprob": (NUMBERS,),
    "stop_token_ids": (NUMBERS,),
    "input_embeds": (WEIGHTS, {float}),
    "logit_bias": (WEIGHTS, {float}, NUMBERS),
}


class Bounded:
    """ASGI middleware that answers 413 to a body that is longer, or holds more items, than any request needs.

    Args:
        model_config: returns the engine's, once the server is up; its context decides how long a body may be.
    """

    def __init__(self, app, model_config: Callable) -> None:
        self.app, self.model_config = app, model_config

    async def __call__(self, scope, receive, send) -> None:
        path = scope.get("path", "")
        bounded = path.startswith(ROUTES) and not path.startswith(RECORDINGS)
        if scope["type"] != "http" or scope["method"] != "POST" or not bounded:
            await self.app(scope, receive, send)
            return
        most = most_bytes(self.model_config())
        body, length, more = bytearray(), 0, True
        while more:
            message = await receive()
            if message["type"] != "http.request":  # the client has gone
                return
            part, more = message.get("body", b""), message.get("more_body", False)
            length += len(part)
            if length <= most:  # the rest is taken, so that the client reads the answer, and not kept
                body += part
        reason = f"a body of at most {most} bytes is read here" if length > most else excess(path, bytes(body))
        if reason is not None:
            await _answer(413, reason)(scope, receive, send)
            return
        pending = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay():
            return pending.pop() if pending else await receive()

        await self.app(scope, replay, send)


def most_bytes(model_config) -> int:
    """Bytes that a body may have."""
    most = max(LEAST_BYTES, BYTES_PER_TOKEN * model_config.context_len)
    return most * PICTURES if model_config.is_multimodal else most


def excess(path: str, body: bytes) -> str | None:
    """Why a body is too large to be validated, or None; also None for what is no JSON object, which others refuse."""
    if body.count(b",") < MOST_TURNS:
        return None
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    for key, value in fields.items():
        turns = key == "messages" or (key == "input" and path == "/v1/responses")
        if not turns and is_plain(value, DATA.get(key, ())):
            continue
        most = MOST_TURNS if turns else MOST_ITEMS
        if count(value, most) > most:
            return f"{key[:40]} holds more than {most} items: send fewer"
    return None


def is_plain(value: object, kinds: tuple[set, ...]) -> bool:
    """Whether a field holds items of one of `kinds` and nothing else; numbers may lie in lists of lists."""
    level = list(value.values()) if isinstance(value, dict) else value
    for depth in range(4):
        if not isinstance(level, list):
            return False
        found = set(map(type, level))
        if found != {list}:
            return found in kinds and not (depth and found == TEXTS)
        level = list(chain.from_iterable(level))
    return False


def count(value: object, most: int) -> int:
    """Items of a field, and of the lists inside it; it may stop once they are more than `most`."""
    items = len(value) if isinstance(value, dict) else 0
    level = [value] if isinstance(value, (dict, list)) else []
    while level and items <= most:
        items += sum(len(part) for part in level if isinstance(part, list))
        inner = chain.from_iterable(part.values() if isinstance(part, dict) else part for part in level)
        level = [part for part in inner if isinstance(part, (dict, list))]
    return items


def add_handlers(app) -> None:
    """Answer 400 to what reading a body raises; the same errors of the server itself stay a 500."""

    async def answer(request, error: Exception):
        if not while_reading(error):
            raise error
        return _answer(400, f"the body cannot be read as this route's request ({type(error).__name__}: {error})")

    for kind in ERRORS:
        app.add_exception_handler(kind, answer)


def while_reading(error: Exception) -> bool:
    """Whether an error was raised in the reading of a body."""
    return any(frame.f_code.co_name in READERS for frame, _ in traceback.walk_tb(error.__traceback__))


def _answer(status: int, reason: str):
    from fastapi.responses import JSONResponse

    return JSONResponse({"error": {"message": reason, "type": "invalid_request_error", "code": status}}, status)
