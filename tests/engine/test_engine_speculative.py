"""`sglang.Engine` without a server, speculating, with llguidance as grammar backend.

Bug class: what only the HTTP server sets up (settings, request checks, numbering of choices) and an engine in the
user's process lacks; a second grammar backend whose mask, rollback or end differs from xgrammar's. Whole greedy texts are
held to transformers'; every grammar is asked with drafts and, in the same engine, without (`enabled: false`: one token a
step), and must give one text. Planted once and seen to fail: a grammar set back one token too few; no request checks.
"""

from __future__ import annotations

import json
import re

import pytest

from sglang_dspark.settings.config import DSparkConfig
from sglang_dspark.settings.flags import ALGORITHM, attach
from tests.engine.engines import by_transformers
from tests.engine.tiny import EOS_ID, PROMPTS, tiny_target
from tests.engine.tiny_draft import soften_layers, tiny_draft

PLAIN = {"dspark": {"enabled": False}}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
NUMBERED = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["n"],
    "additionalProperties": False,
}
REGEXES = ("[a-c]{3,9}-[0-9]{2}", "(ab|cd|e)+x?", "[A-Z][a-z]{2,12}!", "a", "the river ran past the mill")
GRAMMARS = [
    *({"regex": regex} for regex in REGEXES),
    *({"json_schema": json.dumps(schema)} for schema in (SCHEMA, NUMBERED)),
    {"ebnf": 'root ::= "a" rest\nrest ::= [b-d] rest | "." '},
    {"regex": "[A-Za-z0-9 .,:;'()]{20,60}"},
    {"regex": "[a-z]{20}", "frequency_penalty": 1.0, "repetition_penalty": 1.3},
    {"regex": "[a-z]{30}", "stop": ["e", "th"]},
    {"regex": "[a-z]{9}", "max_new_tokens": 2},
]
LOOKS = ({"temperature": 0.0}, {"temperature": 1.0, "sampling_seed": 5})


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return soften_layers(tiny_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def engine(target, tmp_path_factory):
    import sglang
    from sglang.srt.server_args import ServerArgs

    draft = tiny_draft(tmp_path_factory.mktemp("draft"), target, agreeing=True, architecture="LlamaDSparkModel")
    arguments = ServerArgs(
        model_path=str(target),
        dtype="float32",
        max_total_tokens=4096,
        log_level="error",
        skip_server_warmup=True,
        grammar_backend="llguidance",
        speculative_algorithm=ALGORITHM,
        speculative_draft_model_path=str(draft),
    )
    running = sglang.Engine(server_args=attach(arguments, DSparkConfig(verify_mode="static")))
    yield running
    running.shutdown()


def accepted(answers) -> int:
    """Drafts accepted in all; an answer of one token never met a draft and has no such number."""
    return sum(answer["meta_info"].get("spec_num_correct_drafts", 0) for answer in answers)


def test_greedy_text_is_transformers_with_accepted_drafts(engine, target):
    answers = engine.generate(PROMPTS[:6], {"temperature": 0.0, "max_new_tokens": 32, "ignore_eos": True})
    assert [answer["output_ids"] for answer in answers] == by_transformers(target, PROMPTS[:6], 32)
    assert accepted(answers) > 20, "nothing was drafted"


def test_choices_of_a_seeded_request_take_seed_plus_i(engine):
    common = {"temperature": 1.0, "max_new_tokens": 12}
    together = engine.generate(PROMPTS[0], {**common, "sampling_seed": 40, "n": 3})
    alone = [engine.generate(PROMPTS[0], {**common, "sampling_seed": 40 + i, "custom_params": PLAIN}) for i in range(3)]
    assert [answer["output_ids"] for answer in together] == [answer["output_ids"] for answer in alone]


def test_llguidance_gives_the_text_that_it_gives_one_token_at_a_time(engine):
    params = [
        {"max_new_tokens": 40, "logit_bias": {str(EOS_ID): 2.0}, **looks, **grammar}
        for grammar in GRAMMARS
        for looks in LOOKS
    ]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    drafted = engine.generate(prompts, params)
    plainly = engine.generate(prompts, [{**p, "custom_params": PLAIN} for p in params])
    for given, ours, theirs in zip(params, drafted, plainly, strict=True):
        assert ours["output_ids"] == theirs["output_ids"], given
        assert ours["meta_info"]["finish_reason"] == theirs["meta_info"]["finish_reason"], given
    assert accepted(drafted) > 0 == accepted(plainly), "no draft was accepted"
    for given, answer in zip(params, drafted, strict=True):
        if answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS_ID}:
            text = answer["text"]
            assert re.fullmatch(given["regex"], text) if "regex" in given else text[0] in "a{"
            assert "json_schema" not in given or isinstance(json.loads(text)["n"], int)


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"sampling_params": {"custom_params": {"dspark": {"windows": 2}}}}, "windows"),
        ({"sampling_params": {"custom_params": {"DSpark": {}}}}, "written dspark"),
        ({"sampling_params": {"colour": 1}}, "colour"),
        ({"return_hidden_states": True}, "--verify-mode off"),
        ({"image_data": "data:image/png;base64,AAAA"}, "text only"),
    ],
)
def test_a_request_that_cannot_be_served_is_a_value_error_with_the_reason(engine, asked, word):
    with pytest.raises((ValueError, TypeError), match=word):
        engine.generate(PROMPTS[0], **asked)
    assert engine.generate(PROMPTS[0], {"max_new_tokens": 2})["meta_info"]["completion_tokens"] == 2
