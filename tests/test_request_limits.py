"""The table of request limits: every row lets its borders pass and names the field of what lies outside.

Bug class: a border that is off by one (the vocabulary's size as a token id), a value of another type that slips through
a comparison (true, NaN, a text), and a row that reads another field than it names. The same over HTTP, against a
scheduler that would die of it: tests/server/test_hostile_requests.py.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel, model_validator

from sglang_dspark.engine.request_limits import (
    LIMITS,
    MOST_CHOICES,
    SHORT_TEXT,
    Request,
    _refuse_long_texts,
    check,
    extent_of,
)
from sglang_dspark.serving.bodies import add_handlers

VOCABULARY, TOKENS, PROMPT = 512, 500, [1, 2, 3]
TEXTS = ("lora_id", "extra_key", "cache_salt", "bootstrap_host", "bootstrap_pair_key", "routing_key")
INSIDE = {
    "max_new_tokens": [0, 2**31 - 1], "min_new_tokens": [0, 7], "top_k": [-1, 1, 2**31 - 1],
    "temperature": [0, 0.0, 1e6, 2], "stream_interval": [1], "stop_token_ids": [[], [0, 511], {511}],
    "logit_bias": [{}, {"0": -1, "511": 2.5}], "stop_regex": ["a+", ["[ab]", "x|y"], ""],
    "custom_params": [{}, {"a": [[{"b": [1]}]]}, {"a": 1, "b": [1, "x", None], "dspark": {"max_window": 2}}],
    "top_logprobs_num": [0, 512], "token_ids_logprob": [[0, 511]], "logprob_start_len": [-1, 0, 3],
    "multi_item_delimiter_indices": [[0, 2]], "token_indices_to_pool": [[2]], "routed_experts_start_len": [0, 3],
    "positional_embed_overrides": [SimpleNamespace()], "priority": [-3, 2**31 - 1], "bootstrap_room": [2**63 - 1],
    "bootstrap_port": [0, 65535],
    "session_params": [{"id": "s", "rid": None, "offset": 1}], **{field: ["", "a"] for field in TEXTS},
}  # fmt: skip
OUTSIDE = {
    "max_new_tokens": [-1, 2**31, 1.5, True, "8"], "min_new_tokens": [-1, 2**63], "top_k": [0, -2, 2**31, 1.0, True],
    "temperature": [True, -0.1, 1.1e6, float("nan"), float("inf"), "hot"], "stream_interval": [0, -1],
    "stop_token_ids": [[512], [-1], [1, 10**400], "a", [True]],
    "logit_bias": [{"512": 1}, {"-1": 1}, {"a": 1}, {"²": 1}, {"1": float("nan")}, {"1": "x"}, [1]],
    "stop_regex": ["[", ["a", "("], r"\p{L}", "(" * 200, 5],
    "custom_params": [{"a": 2**63}, {"a": [[{"b": -(2**70)}]]}, {"a": json.loads("[" * 80 + "]" * 80)}], "top_logprobs_num": [-1, 513, True],
    "token_ids_logprob": [[512], [-1], ["a"]], "logprob_start_len": [-2, 4], "multi_item_delimiter_indices": [[3], [-1]],
    "token_indices_to_pool": [[3], -1], "routed_experts_start_len": [-1, 4], "positional_embed_overrides": [[1], 5, {}],
    "priority": [2**31, -(2**70)], "bootstrap_room": [2**63], "bootstrap_port": [-1, 65536],
    "session_params": [{"a": 1}, "s", {"id": "s", "seed": 1}], **{field: [["a"], [None], 5] for field in TEXTS},
}  # fmt: skip


def request(field: str | None = None, value: object = None, ids: list[int] = PROMPT) -> Request:
    inner = field is not None and field.startswith("sampling_params.")
    fields = {"input_embeds": None, "session_params": None} | ({} if inner or field is None else {field: value})
    sampling = {field.removeprefix("sampling_params."): value} if inner else {}
    return Request(SimpleNamespace(**fields), sampling, ids, VOCABULARY, TOKENS)


@pytest.mark.parametrize("row", LIMITS, ids=lambda row: row.field)
def test_a_row_lets_its_borders_pass_and_names_what_lies_outside(row):
    name = row.field.removeprefix("sampling_params.")
    for value in INSIDE[name]:
        check(request(row.field, value))
    for value in OUTSIDE[name]:
        with pytest.raises(ValueError, match=f"^{row.field} .*: ") as refusal:
            check(request(row.field, value))
        assert len(str(refusal.value)) < 200, "a message does not repeat what it was sent at full length"
    check(request(row.field, None))


def test_the_tables_of_this_test_and_the_rows_are_the_same_fields():
    names = {row.field.removeprefix("sampling_params.") for row in LIMITS}
    assert names == set(INSIDE) == set(OUTSIDE) and len(names) == len(LIMITS)


@pytest.mark.parametrize("ids", [[], [-1], [TOKENS], [1, VOCABULARY], [10**12]], ids=str)
def test_a_prompt_has_tokens_of_the_tokenizer_and_at_least_one(ids):
    """The padding of a model's vocabulary is no token either."""
    with pytest.raises(ValueError, match="empty|input_ids"):
        check(request(ids=ids))
    check(request(ids=[0, TOKENS - 1]))


def test_a_request_of_a_session_may_have_no_prompt_of_its_own():
    without = request(ids=[])
    without.fields.session_params = {"id": "s"}
    check(without)


def test_a_tokenizer_with_holes_reaches_as_far_as_its_highest_id():
    assert extent_of(Vocabulary({"a": 0, "longest": 9})) == (10, 7)
    assert extent_of(None) == (0, 0)


def test_a_text_that_cannot_fit_is_refused_before_it_becomes_tokens():
    """Ten megabytes take a tokenizer many seconds, in the loop that answers everybody."""
    manager = SimpleNamespace(allow_auto_truncate=False, context_len=2048, tokenizer=Vocabulary({"a": 0, "longest": 9}))
    _refuse_long_texts(manager, ["short", "a" * SHORT_TEXT])
    for texts in ("a" * (SHORT_TEXT + 1), ["short", "a" * 10_000_000]):
        with pytest.raises(ValueError, match="context of 2048 tokens"):
            _refuse_long_texts(manager, texts)
    manager.allow_auto_truncate = True
    _refuse_long_texts(manager, "a" * 10_000_000)


class Vocabulary:
    def __init__(self, entries: dict[str, int]) -> None:
        self.get_vocab = lambda: entries


def test_fields_that_do_not_fit_each_other_are_an_error_of_the_request():
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.plugins import load_plugins

    load_plugins()
    with pytest.raises(ValueError, match="fit each other"):
        GenerateReqInput(text=["a", "b"], sampling_params=[]).normalize_batch_and_arguments()
    for choices in (0, MOST_CHOICES + 1, "3"):
        with pytest.raises(ValueError, match=r"sampling_params\.n "):
            GenerateReqInput(text="a", sampling_params={"n": choices}).normalize_batch_and_arguments()


class Body(BaseModel):
    a: int = 0

    @model_validator(mode="before")
    @classmethod
    def looks_inside(cls, value):
        value["a"]["b"]
        return value


def test_an_error_while_a_body_is_read_is_a_400_and_one_of_the_server_stays_a_500():
    app = FastAPI()
    add_handlers(app)

    @app.post("/read")
    async def read(body: Body):
        return body

    @app.post("/own")
    async def own():
        return {}["a"]

    client = TestClient(app, raise_server_exceptions=False)
    for body in ([1], {"a": 5}, {}):
        answer = client.post("/read", json=body)
        assert answer.status_code == 400 and "the body cannot be read" in answer.json()["error"]["message"]
    assert client.post("/own").status_code == 500
