"""The clients that people use find what they look for: chat, streams, tools, JSON schema, usage, ends and errors.

Bug classes: a field that is null where a client reads an object, an error whose message a client cannot find, a budget
that is not the one asked for, an end that is told as another one; a stream that says something else than its whole answer.
openai and anthropic for Python are installed with SGLang. With --long, openai for Node and two frameworks are installed
from their registries into a folder of the test's own, since they ask for other versions of what SGLang needs (litellm:
28 s, 356 MB; langchain-openai: 14 s, 111 MB; openai for Node: 3 s, 15 MB). Last run: 2026-12-01, all three pass.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest

from tests.server.test_status_and_metrics import configure

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "now": {"type": "boolean"}},
    "required": ["city", "now"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
ASK = {
    "model": "m",
    "messages": [{"role": "user", "content": "The river ran past the mill"}],
    "max_tokens": 80,
    "temperature": 0,
    "logit_bias": {
        str(i): -100 for i in (203, 204, 207, 226)
    },  # JSON without blanks, which a tiny model would go on with
}
CLIENTS = Path(__file__).parent / "clients"


@pytest.fixture
def served(watched):
    """The server with a tool parser, drafting in every step."""
    configure(watched, json={"verify_mode": "static", "min_window": 0})
    return watched


@pytest.fixture
def client(served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url + "/v1", api_key="none")


def is_place(value: dict) -> bool:
    return set(value) == {"city", "now"} and value["city"] in ("Paris", "Rome") and isinstance(value["now"], bool)


def test_a_stream_is_its_whole_answer_with_all_details_of_its_usage(client):
    whole = client.chat.completions.create(**ASK)
    chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    for usage in (whole.usage, chunks[-1].usage):
        assert usage.completion_tokens_details.reasoning_tokens == 0
        assert 0 <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0, "the second time the prompt is in the cache"


def test_a_tool_is_called_with_arguments_of_its_schema_streamed_or_not(client):
    ask = {**ASK, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = client.chat.completions.create(**ask).choices[0].message.tool_calls
    assert call.function.name == "weather" and is_place(json.loads(call.function.arguments))
    name = arguments = ""
    for chunk in client.chat.completions.create(**ask, stream=True):
        for part in chunk.choices[0].delta.tool_calls or () if chunk.choices else ():
            name, arguments = name + (part.function.name or ""), arguments + (part.function.arguments or "")
    assert (name, arguments) == (call.function.name, call.function.arguments)


def test_a_json_schema_is_kept(client):
    answer = client.chat.completions.create(**ASK, response_format=FORMAT)
    assert is_place(json.loads(answer.choices[0].message.content))


def test_responses_may_use_the_whole_of_their_budget(client):
    (model,) = client.models.list().data
    answer = client.responses.create(model=model.id, input=ASK["messages"], max_output_tokens=16, temperature=0)
    assert answer.status == "incomplete" and answer.usage.output_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_says_which_stop_sequence_ended_it(served, stream):
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=served.url, api_key="none")
    ask = {"model": "m", "max_tokens": 24, "messages": ASK["messages"], "extra_body": {"temperature": 0}}

    def answer(**more):
        if not stream:
            return client.messages.create(**ask, **more)
        with client.messages.stream(**ask, **more) as events:
            return events.get_final_message()

    whole = answer()
    assert (whole.stop_reason, whole.stop_sequence) == ("max_tokens", None)
    middle = whole.content[0].text[8:11]
    cut = answer(stop_sequences=["~~", middle])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", middle)
    assert whole.content[0].text.startswith(cut.content[0].text)


def test_a_refusal_reaches_the_client_with_its_reason(client):
    for ask, word in (({**ASK, "max_tokens": -1}, "max_new_tokens -1"), ({**ASK, "messages": 5}, "valid list")):
        with pytest.raises(openai.BadRequestError, match=word) as refused:
            client.chat.completions.create(**ask)
        assert word in refused.value.body["message"] and refused.value.code == 400
        body = refused.value.response.json()
        assert body["error"]["message"] == body["message"], "SGLang's own clients read it at the top"


def test_a_list_of_wrong_items_is_refused_at_once(served):
    began = time.monotonic()
    answer = httpx.post(served.url + "/v1/responses", json={"model": "m", "input": [1] * 2_000_000}, timeout=60)
    assert answer.status_code == 413 and "input holds more than 2048 items" in answer.json()["error"]["message"]
    assert time.monotonic() - began < 20


def run(*command: str | Path, folder: Path, given: str = "") -> str:
    done = subprocess.run(
        [*map(str, command)], check=False, cwd=folder, input=given, text=True, capture_output=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def python_with(package: str, folder: Path) -> list[str | Path]:
    python = folder / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", folder / "venv", folder=folder)
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package, folder=folder)
    return [python]


def node_with(package: str, folder: Path) -> list[str | Path]:
    run("npm", "install", "--silent", "--prefix", folder, package, folder=folder)
    return ["node"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("install", "package", "script"),
    [
        (node_with, "openai@6", "openai_node.mjs"),
        (python_with, "litellm", "litellm_client.py"),
        (python_with, "langchain-openai", "langchain_client.py"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_clients_are_served_too(served, tmp_path, install, package, script):
    program = install(package, tmp_path)
    (tmp_path / script).write_text((CLIENTS / script).read_text())  # Node looks for packages beside the script
    given = json.dumps({"url": served.url + "/v1", "ask": ASK, "tools": TOOLS, "format": FORMAT})
    said = json.loads(run(*program, tmp_path / script, folder=tmp_path, given=given).splitlines()[-1])
    assert said["chat"] and said["stream"] == said["chat"]
    assert said["tool"]["name"] == "weather" and is_place(said["tool"]["arguments"]) and is_place(said["json"])
    assert "max_new_tokens -1" in said["refused"]
