"""How large a body may be, and how an error looks to a client, on an application without an engine.

Bug classes: a body that costs gigabytes before it is refused, because every wrong item of a list is reported for every
type that it might have been; a bound that refuses an ordinary request; an error without the object in which clients look
for its message.
"""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI, HTTPException, Request

from sglang_dspark.serving import bodies
from sglang_dspark.serving.bodies import LEAST_BYTES, MOST_ITEMS, MOST_TURNS, PICTURES, Bounded, most_bytes
from sglang_dspark.serving.error_bodies import NamedErrors

CHAT, RESPONSES, GENERATE, COMPLETE = "/v1/chat/completions", "/v1/responses", "/generate", "/v1/completions"


@pytest.fixture
def application():
    app = FastAPI()

    @app.post("/{path:path}")
    async def length(path: str, request: Request):
        if path.endswith("refused"):
            raise HTTPException(409, "not now")
        return len(await request.body())

    app.add_middleware(NamedErrors)
    app.add_middleware(Bounded, model_config=lambda: SimpleNamespace(context_len=8192, is_multimodal=False))
    return app


def post(app, path: str, content: bytes | list[bytes]) -> httpx.Response:
    async def chunks():
        for part in content:
            yield part

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.post(path, content=content if isinstance(content, bytes) else chunks())

    return asyncio.run(ask())


def turns(many: int) -> list[dict]:
    return [{"role": "user", "content": [{"type": "text", "text": "a, b"}]}] * many


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSES, {"input": [1] * 2_000_000}),
        (RESPONSES, {"input": turns(MOST_TURNS)}),
        (CHAT, {"messages": [{"role": "user", "content": [{}] * 20_000}]}),
        (CHAT, {"messages": [{}] * 20_000}),
        ("/v1/messages", {"messages": [1] * 20_000}),
        ("/api/chat", {"messages": [1] * 20_000}),
        (CHAT, {"messages": turns(1), "tools": [{}] * (MOST_ITEMS + 1)}),
        (CHAT, {"messages": turns(1), "logit_bias": {str(i): "x" for i in range(MOST_ITEMS + 1)}}),
        (COMPLETE, {"prompt": [1] * MOST_ITEMS + [None]}),
        (COMPLETE, {"prompt": [["x"] * MOST_ITEMS]}),
        (GENERATE, {"text": [1] * (MOST_ITEMS + 1)}),
        (GENERATE, {"input_ids": [True] * (MOST_ITEMS + 1)}),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_a_body_with_more_items_than_any_request_needs_is_a_413_that_says_which(application, path, body):
    began = time.thread_time()
    answer = post(application, path, json.dumps(body).encode())
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (413, 413)
    assert "holds more than" in error["message"] and error["message"].split()[0] in body
    assert time.thread_time() - began < 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": turns(MOST_TURNS // 2), "logit_bias": {str(i): -1.5 for i in range(150_000)}}),
        (RESPONSES, {"input": "a, " * 500_000}),
        (GENERATE, {"input_ids": [[1, 2] * 4096] * 40}),
        (GENERATE, {"text": ["a, b"] * 100_000, "sampling_params": [{"temperature": 0}] * 20_000}),
        (GENERATE, {"input_embeds": [[0.5] * 576] * 200}),
        (COMPLETE, {"prompt": list(range(200_000))}),
        (CHAT, [1] * 100_000),
        ("/update_weights_from_tensor", {"messages": [1] * 100_000}),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_an_ordinary_body_reaches_its_route_whole(application, path, body):
    content = json.dumps(body).encode()
    answer = post(application, path, content)
    assert (answer.status_code, answer.json()) == (200, len(content))


@pytest.mark.parametrize("content", [b"{", b"[" * 5000 + b",]" * 5000, b'{"a": [' + b"\xff," * 5000 + b"]}"])
def test_a_body_that_is_no_json_is_left_to_its_route(application, content):
    assert post(application, CHAT, content).json() == len(content)


def test_a_body_that_is_too_long_is_taken_to_its_end_and_not_kept(application, monkeypatch):
    monkeypatch.setattr(bodies, "LEAST_BYTES", 1000)
    monkeypatch.setattr(bodies, "BYTES_PER_TOKEN", 0)
    for content in (b"a" * 1001, [b"a" * 400] * 3):
        answer = post(application, GENERATE, content)
        assert answer.status_code == 413 and "at most 1000 bytes" in answer.json()["error"]["message"]
    assert post(application, GENERATE, [b"a" * 500] * 2).json() == 1000
    tracemalloc.start()
    assert post(application, GENERATE, [b"a" * (1 << 20)] * 64).status_code == 413
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


def test_a_longer_context_and_pictures_allow_longer_bodies():
    def most(tokens: int, pictures: bool = False) -> int:
        return most_bytes(SimpleNamespace(context_len=tokens, is_multimodal=pictures))

    assert most(8192) == LEAST_BYTES and most(1 << 20) == 64 << 20 and most(8192, True) == PICTURES * LEAST_BYTES


def test_an_error_of_the_openai_routes_has_an_error_object_beside_what_it_said(application):
    answer = post(application, "/v1/refused", b"{}")
    assert answer.status_code == 409 and answer.json() == {
        "detail": "not now",
        "error": {"message": "not now", "type": "invalid_request_error", "param": None, "code": 409},
    }
    assert post(application, "/refused", b"{}").json() == {"detail": "not now"}
