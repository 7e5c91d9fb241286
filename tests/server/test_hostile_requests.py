"""One request must not end everybody's server, whatever its fields hold.

Bug classes: a field that becomes an index, a size or a compiled pattern and is used unchecked in the scheduler, where it
ends the process for everybody (the table of `engine/request_limits.py`, row by row); a body that the engine answers with
a 500; a pattern that holds the step. Every listed request but those of the last table ended a server, or was a 500,
before there was a check. The generator then changes every field of four routes to values that nobody means, and asks of
the server as a whole: no 5xx, no answer that never comes, and the same greedy text before and after. Last run of the long
one: 2026-12-01, 6000 requests without a fault, after it had found one that ended the server (`lora_id`) and two 500s.
"""

from __future__ import annotations

import json
import re
import ssl
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from sglang_dspark.bench.local import LocalServer
from tests.engine.tiny import VOCAB_SIZE
from tests.server.hostile import BODIES, Attack, attacks, malformed

TEXT = {"text": "The river ran", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
BOUND = str(VOCAB_SIZE)
NO_CERTIFICATES = ssl.SSLContext(
    ssl.PROTOCOL_TLS_CLIENT
)  # to read them for each request takes longer than to answer it


def generate(**changes) -> tuple[str, object]:
    return "/generate", {**TEXT, **changes}


def sampling(**changes) -> tuple[str, object]:
    return generate(sampling_params={"max_new_tokens": 4, **changes})


def prompt(tokens: list) -> tuple[str, object]:
    return "/generate", {"input_ids": tokens, "sampling_params": TEXT["sampling_params"]}


def complete(text, **changes) -> tuple[str, object]:
    return "/v1/completions", {"model": "m", "prompt": text, "max_tokens": 4, **changes}


def chat(**changes) -> tuple[str, object]:
    return "/v1/chat/completions", {**BODIES["/v1/chat/completions"], **changes}


# What is sent, and words of the answer.
LISTED = [
    (generate(text=""), "empty"),
    (complete(["a", ""]), "empty"),
    (complete([[5], []]), "empty"),
    (prompt([VOCAB_SIZE]), BOUND),
    (prompt([-1]), "input_ids -1"),
    (prompt([5, 999999]), "input_ids 999999"),
    (prompt([10**12]), "input_ids 1000000000000"),
    (prompt([10**30]), ""),
    (complete([200000]), "input_ids 200000"),
    (chat(logprobs=True, top_logprobs=VOCAB_SIZE + 1), f"top_logprobs_num {VOCAB_SIZE + 1}"),
    (complete("a", logprobs=VOCAB_SIZE + 1), f"top_logprobs_num {VOCAB_SIZE + 1}"),
    (generate(return_logprob=True, top_logprobs_num=VOCAB_SIZE + 1), BOUND),
    (generate(return_logprob=True, top_logprobs_num=-1), "top_logprobs_num -1"),
    (generate(return_logprob=True, logprob_start_len=-5), "logprob_start_len -5"),
    (generate(return_logprob=True, logprob_start_len=99), "logprob_start_len 99"),
    (generate(return_logprob=True, token_ids_logprob=[VOCAB_SIZE]), "token_ids_logprob"),
    (sampling(top_k=2**31), "top_k 2147483648"),
    (sampling(n=10**9), "n 1000000000"),
    (sampling(n=0), "n 0"),
    (sampling(max_new_tokens=2**63), "max_new_tokens 9223372036854775808"),
    (sampling(min_new_tokens=2**63, max_new_tokens=None), "min_new_tokens"),
    (sampling(stream_interval=0), "stream_interval 0"),
    (sampling(temperature=1e300), "temperature 1e+300"),
    *((sampling(stop_token_ids=[t], min_new_tokens=2, temperature=T), f"stop_token_ids {t}")
      for t in (VOCAB_SIZE, 999999, -1) for T in (0, 1)),
    (sampling(logit_bias={BOUND: 1}), BOUND),
    (sampling(logit_bias={"-1": 1}), "logit_bias"),
    (sampling(logit_bias={"²": 1}), "logit_bias"),
    *((sampling(stop_regex=pattern), "stop_regex") for pattern in ("[", "(", r"\p{L}", "(" * 200)),
    (sampling(json_schema='{"$ref":"#"}'), ""),
    (chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}), ""),
    (generate(positional_embed_overrides=[1]), "positional_embed_overrides"),
    (generate(text=["a", "b"], sampling_params=[{}]), "fit"),
    (generate(session_params={"id": 5}), ""),
    (generate(session_params={"a": 1}), "session_params"),
    (generate(lora_id=["a"]), "lora_id"),
    (chat(rid=["a"]), "rid"),
    *(((path, [1, 2]), "") for path in (*BODIES, "/api/chat")),
    (("/api/chat", {"model": "m", "stream": False}), ""),
    (("/api/generate", {"model": "m", "stream": False}), ""),
]  # fmt: skip


def send(server: LocalServer, attack: Attack, timeout: float = 60) -> tuple[int, str]:
    """Status and text of the answer; status 0 where none came."""
    try:
        answer = httpx.post(
            server.url + attack.path,
            content=attack.body,
            headers={"content-type": "application/json"},
            timeout=timeout,
            verify=NO_CERTIFICATES,
        )
    except httpx.HTTPError as error:
        return 0, f"{type(error).__name__}: {error}"
    return answer.status_code, answer.text


@pytest.fixture
def unharmed(dspark):
    """The server, and afterwards the proof that it still says what it said."""
    ask = {"text": "The river ran past the mill", "sampling_params": {"max_new_tokens": 24, "temperature": 0}}
    before = dspark.post("/generate", ask)["text"]
    yield dspark
    assert dspark.process.poll() is None, dspark.tail()
    assert dspark.post("/generate", ask)["text"] == before


@pytest.mark.parametrize(("request_", "words"), LISTED, ids=lambda value: json.dumps(value)[:80] if value else "-")
def test_a_request_outside_the_models_limits_is_a_400_that_says_which(unharmed, request_, words):
    path, body = request_
    status, text = send(unharmed, Attack(path, json.dumps(body).encode(), path))
    assert status == 400 and words in text, (status, text[:300])


def test_a_stop_pattern_that_runs_for_ever_ends_its_request_and_holds_nobody(unharmed):
    slow = {"max_new_tokens": 400, "ignore_eos": True, "stop_regex": r"(?:.|..)+\d{9}$"}
    with ThreadPoolExecutor() as pool:
        began = time.monotonic()
        held = pool.submit(
            send, unharmed, Attack("/generate", json.dumps({**TEXT, "sampling_params": slow}).encode(), "")
        )
        neighbour = unharmed.generate("Snow fell", max_new_tokens=16, temperature=0)
        status, text = held.result()
    assert status == 400 and "stop_regex" in text and "simplify it" in text, (status, text[:300])
    assert neighbour and time.monotonic() - began < 30


def test_a_stop_pattern_still_stops_where_it_did(unharmed):
    (whole,) = unharmed.generate("The river ran", max_new_tokens=24, temperature=0)
    middle = whole["text"][8:11]
    ordinary = {"max_new_tokens": 24, "temperature": 0, "stop_regex": ["~~~", re.escape(middle)]}
    (stopped,) = unharmed.generate("The river ran", **ordinary)
    assert stopped["meta_info"]["finish_reason"]["type"] == "stop"
    assert whole["text"].startswith(stopped["text"]) and len(stopped["text"]) < len(whole["text"])


def faults(server: LocalServer, sent: list[Attack], timeout: float = 60) -> list[str]:
    """What went wrong: an answer that says that the server failed, or none in `timeout` seconds."""
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda attack: send(server, attack, timeout), sent))
    return [
        f"{status} {attack.what}: {text[:200]}"
        for attack, (status, text) in zip(sent, answers)
        if not 200 <= status < 500 or '"code":5' in text or '"code": 5' in text
    ]


def test_no_field_of_any_route_can_end_the_server_or_make_it_fail(unharmed):
    assert faults(unharmed, attacks(seed=1, count=400)) == []


def test_no_malformed_body_can_end_the_server_or_make_it_fail(unharmed):
    assert faults(unharmed, [attack for path in BODIES for attack in malformed(path)], timeout=180) == []


@pytest.mark.long
def test_thousands_of_hostile_requests_leave_the_server_as_it_was(unharmed):
    assert faults(unharmed, attacks(seed=2, count=6000)) == []
