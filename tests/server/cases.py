"""The table of `test_equivalence`: one line, one request."""

from __future__ import annotations

import json

from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

from tests.engine.tiny import EOS_ID, PROMPTS
from tests.server.compare import Case
from tests.server.processors import Counting, Overwriting, by_value

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 9999, "minimum": 0}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}}
OTHER_TOOL = {"type": "function", "function": {"name": "sub", "parameters": SCHEMA}}
EBNF = 'root ::= "a" rest\nrest ::= [b-d] rest | "." '
TAGGED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": TAGGED, "end": "</f>"}],
    "triggers": ["<f>"],
}


def generate(name: str, prompt: int = 0, length: int = 24, extra: dict | None = None, **sampling) -> Case:
    """A `/generate` request, greedy unless a temperature is given."""
    params = {"temperature": 0.0, "max_new_tokens": length, **sampling}
    return Case(name, {"text": PROMPTS[prompt % len(PROMPTS)], "sampling_params": params, **(extra or {})})


def sampled(name: str, prompt: int = 0, **sampling) -> Case:
    """A seeded request at temperature 1."""
    return generate(name, prompt, **{"temperature": 1.0, "sampling_seed": 100 + prompt, **sampling})


def chat(name: str, extra: dict | None = None, prompt: int = 0, **options) -> Case:
    """A chat request, greedy unless a temperature is given."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": PROMPTS[prompt]}],
        "temperature": 0.0,
        "max_tokens": 24,
    }
    return Case(name, {**body, **options, **(extra or {})}, "/v1/chat/completions")


def completion(name: str, prompt=PROMPTS[0], **options) -> Case:
    """A completion request, greedy unless a temperature is given."""
    return Case(
        name, {"model": "m", "prompt": prompt, "temperature": 0.0, "max_tokens": 24, **options}, "/v1/completions"
    )


LOGPROBS = {"return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 0}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
ASCII = {str(i): -100.0 for i in range(6, 262)}  # no single bytes: SGLang's chat stream drops what has no text yet
BIAS = {str(i): (9.0 if i % 2 else -9.0) for i in range(40, 120)}

SAMPLING = [
    *(generate(f"greedy-{i}", i) for i in range(4)),
    *(generate(f"length-{n}", 1, n) for n in (0, 1, 2, 3, 4, 5, 6)),
    sampled("seed"),
    sampled("temperature", 1, temperature=1.7),
    sampled("cold", 2, temperature=0.2),
    sampled("top-p", 3, top_p=0.7),
    sampled("top-k", 4, top_k=4),
    sampled("min-p", 5, min_p=0.2),
    sampled("all-filters", 6, top_p=0.9, top_k=20, min_p=0.01),
    sampled("top-k-1", 7, top_k=1),
    generate("n-3", 8, temperature=1.0, sampling_seed=3, n=3),
    generate("n-2-greedy", 9, n=2),
    sampled("nothing-generated", 3, max_new_tokens=0),
    generate("two-prompts", extra={"text": PROMPTS[3:5]}),
]
PENALTIES = [
    generate("frequency", frequency_penalty=1.5),
    generate("presence", 1, presence_penalty=1.5),
    generate("repetition", 2, repetition_penalty=1.4),
    generate("negative-frequency", 3, frequency_penalty=-2.0),
    generate("repetition-below-1", 4, repetition_penalty=0.6),
    generate("all-penalties", 5, 40, frequency_penalty=0.7, presence_penalty=-0.4, repetition_penalty=1.3),
    sampled("sampled-penalties", 6, frequency_penalty=1.2, repetition_penalty=1.2, top_p=0.9),
    generate(
        "order-of-penalties",
        5,
        30,
        extra={"return_logprob": True},
        frequency_penalty=-1.0,
        presence_penalty=-0.7,
        repetition_penalty=0.8,
    ),
    generate("bias", 7, logit_bias=BIAS),
    sampled("sampled-bias", 8, logit_bias=BIAS),
    generate("ban", 9, logit_bias={str(i): -100.0 for i in range(6, 250)}),
    generate("bias-and-penalty", 10, logit_bias=BIAS, repetition_penalty=1.5, presence_penalty=1.0),
    generate("force-eos", 11, logit_bias={str(EOS_ID): 100.0}),
    *(generate(f"min-tokens-{n}", 11, min_new_tokens=n, logit_bias={str(EOS_ID): 100.0}) for n in (1, 2, 3, 5, 6, 11)),
    generate("min-tokens-stop-ids", 12, min_new_tokens=9, stop_token_ids=list(range(6, 200))),
    sampled("min-tokens-sampled", 13, min_new_tokens=7, logit_bias={str(EOS_ID): 5.0}),
    generate("ignore-eos", 11, 12, logit_bias={str(EOS_ID): 100.0}, ignore_eos=True),
]
PROCESSORS = [
    generate(
        "disallowed",
        14,
        extra={"custom_logit_processor": DisallowedTokensLogitsProcessor.to_str()},
        custom_params={"token_ids": list(range(6, 300))},
    ),
    generate("counting", 15, extra={"custom_logit_processor": by_value(Counting)}, custom_params={"x": 1}),
    sampled("counting-sampled", 16, custom_params={"x": 2}),
    generate(
        "last-word",
        17,
        6,
        extra={"custom_logit_processor": by_value(Overwriting)},
        custom_params={"token": 77},
        logit_bias={"78": 200.0},
    ),
    generate(
        "last-word-over-grammar",
        17,
        3,
        extra={"custom_logit_processor": by_value(Overwriting)},
        custom_params={"token": 300},
        regex="[0-9]+",
    ),
]
GRAMMARS = [
    generate("json-schema", 0, 60, json_schema=json.dumps(SCHEMA)),
    sampled("json-schema-sampled", 1, max_new_tokens=60, json_schema=json.dumps(SCHEMA)),
    generate("json-schema-cut", 2, 5, json_schema=json.dumps(SCHEMA)),
    generate("json-any", 3, 30, json_schema='{"type": "object"}'),
    generate("regex", 4, regex=r"[a-c]{3,9}-[0-9]{2}"),
    generate("regex-open", 5, regex=r"(ab|cd)+"),
    sampled("regex-sampled", 6, regex=r"[A-Z][a-z]{2,12}!"),
    generate("ebnf", 7, ebnf=EBNF),
    sampled("ebnf-sampled", 8, ebnf=EBNF),
    generate("structural-tag", 9, 30, structural_tag=json.dumps(TAG)),
    sampled("structural-tag-sampled", 10, max_new_tokens=40, structural_tag=json.dumps(TAG), logit_bias={"32": 3.0}),
    generate("grammar-penalty-bias", 11, 40, regex=r"[a-z]{20}", frequency_penalty=1.0, logit_bias=BIAS),
    generate("grammar-stop", 12, 40, regex=r"[a-z]{30}", stop=["e", "th"]),
    generate("grammar-logprobs", 13, 30, extra=LOGPROBS, regex=r"[a-z]{5,20}"),
    generate("grammar-one-token", 14, regex=r"a"),
    generate("regex-fixed", 15, 40, regex="the river ran past the mill"),
]
LOGPROB_CASES = [
    generate("logprobs", extra=LOGPROBS),
    generate("logprobs-1", 1, 1, extra=LOGPROBS),
    generate("logprobs-2", 1, 2, extra=LOGPROBS),
    sampled("logprobs-sampled", 2),
    generate("logprobs-sampled-filtered", 3, extra=LOGPROBS, temperature=1.3, sampling_seed=2, top_p=0.8),
    *(generate(f"logprobs-of-top-k-1-{i}", i, 12, extra=LOGPROBS, temperature=0.3, top_k=1) for i in range(2)),
    # Few tokens are allowed, so the next best ones are far below float32's smallest probability.
    *(
        generate(
            f"logprobs-of-few-tokens-{i}", i, 16, extra=LOGPROBS, repetition_penalty=1.3, regex="(ab|cd|e)+x?", **looks
        )
        for i, looks in enumerate(({}, {"temperature": 0.3, "top_k": 1}, {"temperature": 0.3, "sampling_seed": 6}))
    ),
    *(
        generate(
            f"logprobs-of-unlikely-tokens-{i}",
            5,
            12,
            extra={"return_logprob": True, "token_ids_logprob": [3, 60, 61]},
            logit_bias={"60": -100.0, "61": -85.0},
            **looks,
        )
        for i, looks in enumerate(({}, {"temperature": 0.3, "sampling_seed": 6}))
    ),
    generate("logprobs-penalty", 4, extra=LOGPROBS, frequency_penalty=1.0, logit_bias=BIAS),
    generate("logprobs-of-ids", 5, extra={"return_logprob": True, "token_ids_logprob": [3, 60, 61, 62]}),
    generate("logprobs-text", 6, extra={**LOGPROBS, "return_text_in_logprobs": True}),
    generate("logprobs-stream", 7, extra={**LOGPROBS, "stream": True}),
    generate("stream", 8, extra={"stream": True}),
    generate("logprobs-eos", 11, 9, extra=LOGPROBS, min_new_tokens=3, logit_bias={str(EOS_ID): 30.0}),
    generate("logprobs-n", 9, extra=LOGPROBS, temperature=1.0, sampling_seed=9, n=2),
    generate("prompt-ids", 9, 6, extra={"return_prompt_token_ids": True}),
]
OPENAI = [
    chat("chat"),
    chat("chat-stream", STREAM),
    chat("chat-logprobs", logprobs=True, top_logprobs=4),
    chat("chat-logprobs-stream", STREAM, 1, logprobs=True, top_logprobs=2, logit_bias=ASCII),
    chat("chat-seed", prompt=2, temperature=1.0, seed=4),
    chat("chat-seed-stream", STREAM, 2, temperature=1.0, seed=4),
    chat("chat-n", prompt=3, temperature=1.0, seed=4, n=3),
    chat("chat-n-stream", STREAM, 3, temperature=1.0, seed=4, n=3),
    chat("chat-penalties", prompt=4, frequency_penalty=1.0, presence_penalty=0.5),
    chat("chat-json-object", prompt=5, max_tokens=40, response_format={"type": "json_object"}),
    chat(
        "chat-json-schema",
        prompt=6,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    ),
    chat(
        "chat-json-schema-stream",
        STREAM,
        6,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    ),
    chat("chat-tool-none", prompt=7, tools=[TOOL], tool_choice="none"),
    chat("chat-tool-auto", prompt=7, tools=[TOOL]),
    chat("chat-tool-required", prompt=8, max_tokens=80, tools=[TOOL, OTHER_TOOL], tool_choice="required"),
    chat("chat-tool-required-stream", STREAM, 8, max_tokens=80, tools=[TOOL, OTHER_TOOL], tool_choice="required"),
    chat(
        "chat-tool-named",
        prompt=9,
        max_tokens=80,
        tools=[TOOL, OTHER_TOOL],
        tool_choice={"type": "function", "function": {"name": "sub"}},
    ),
    chat(
        "chat-tool-named-sampled",
        prompt=9,
        max_tokens=80,
        temperature=1.0,
        seed=8,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "add"}},
    ),
    chat("chat-max-completion", prompt=10, max_tokens=None, max_completion_tokens=7),
    chat("chat-declined", prompt=11, custom_params={"dspark": {"enabled": False}}),
    chat("chat-window", prompt=11, custom_params={"dspark": {"max_window": 1}}),
    chat(
        "chat-system",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "the mill"},
            {"role": "assistant", "content": "ran past"},
            {"role": "user", "content": "and?"},
        ],
    ),
    completion("completion"),
    completion("completion-stream", **STREAM),
    completion("completion-logprobs", logprobs=3),
    completion("completion-logprobs-stream", logprobs=3, **STREAM),
    completion("completion-echo", echo=True, logprobs=2),
    completion("completion-prompts", PROMPTS[:3], temperature=1.0, seed=3, n=2),
    completion("completion-suffix-stop", stop=["e", " the"]),
    completion("completion-ids", [60, 61, 62, 63]),
    completion("completion-zero", max_tokens=1),
    Case(
        "messages",
        {"model": "m", "max_tokens": 16, "temperature": 0.0, "messages": [{"role": "user", "content": "The mill"}]},
        "/v1/messages",
    ),
    Case(
        "responses", {"model": "m", "max_output_tokens": 16, "temperature": 0.0, "input": "The mill"}, "/v1/responses"
    ),
    Case(
        "ollama",
        {"model": "m", "prompt": "The mill", "stream": False, "options": {"temperature": 0, "num_predict": 9}},
        "/api/generate",
    ),
    Case(
        "ollama-seed",
        {"model": "m", "prompt": "The mill", "stream": False, "options": {"seed": 4, "num_predict": 9}},
        "/api/generate",
    ),
]
REFUSED = [
    generate("bad-temperature", temperature=-1.0),
    generate("bad-top-p", top_p=1.5),
    generate("bad-min-tokens", min_new_tokens=99),
    generate("bad-bias", logit_bias={"99999": 1.0}),
    generate("two-grammars", regex="a", ebnf=EBNF),
    generate("bad-seed", sampling_seed="x", temperature=1.0),
    generate("image-data", extra={"image_data": "data:image/png;base64,iVBORw0KGgo="}),
    chat(
        "image",
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "what"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
                ],
            }
        ],
    ),
    generate("unreadable-processor", extra={"custom_logit_processor": "{}"}),
    generate("processor-of-no-bytes", extra={"custom_logit_processor": json.dumps({"callable": "00ff"})}),
    generate("sampling-at-the-top", extra={"temperature": 0.0, "max_new_tokens": 3}),
    chat("chat-max-new-tokens", max_new_tokens=3),
    generate("too-long", extra={"text": None, "input_ids": [60] * 2100}),
]
CASES = [*SAMPLING, *PENALTIES, *PROCESSORS, *GRAMMARS, *LOGPROB_CASES, *OPENAI, *REFUSED]
