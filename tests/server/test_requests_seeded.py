"""Seeded requests: one text per (prompt, parameters, seed), whatever the server, the mode, the neighbours and n.

Bug class: a seed that reaches only one of the three places that draw (prefill, plain steps, verification), noise indexed
by rank or batch row instead of token id, a position off by one, or choices of one request that share a seed. Each moves
the text at temperature 1 within a token or two; the first token comes from prefill, the rest from steps, so a prefill
that is not ours is seen by the comparison across servers and by repetition alike.
That it is the same in every mode and under every policy is in test_modes.py.
"""

from __future__ import annotations

import pytest

from tests.engine.tiny import PROMPTS

FILTERS = [
    {},
    {"top_p": 0.8},
    {"top_k": 5},
    {"min_p": 0.1},
    {"top_p": 0.9, "top_k": 40, "min_p": 0.02, "temperature": 1.6},
    {"temperature": 0.4},
]
LENGTH = 20


def ask(server, prompts, params: list[dict]) -> list[list[int]]:
    """Output ids of prompts with their own parameters, in one batch."""
    body = {"text": prompts, "sampling_params": [{"max_new_tokens": LENGTH, "temperature": 1.0, **p} for p in params]}
    return [answer["output_ids"] for answer in server.post("/generate", body)]


def seeded_cases() -> tuple[list[str], list[dict]]:
    """Two prompts with every filter and a seed of their own, large and negative seeds among them."""
    seeds = [11, 12, -5, 2**40 + 3, 2**63 - 1, 0]
    pairs = [(PROMPTS[2 * i + j], {**f, "sampling_seed": seeds[i]}) for i, f in enumerate(FILTERS) for j in range(2)]
    return [p for p, _ in pairs], [s for _, s in pairs]


def neighbours() -> tuple[list[str], list[dict]]:
    """Greedy, filtered and unseeded requests that share the batch."""
    return PROMPTS[12:16], [{"temperature": 0.0}, {"top_k": 3}, {"min_p": 0.3}, {"top_p": 0.5, "temperature": 2.0}]


@pytest.fixture(scope="module")
def reference(plain):
    """Texts of the seeded cases from plain decoding, one batch."""
    return ask(plain, *seeded_cases())


def test_seeded_text_is_the_same_twice_alone_and_with_neighbours_in_plain_decoding(plain, reference):
    prompts, params = seeded_cases()
    others, theirs = neighbours()
    assert ask(plain, others + prompts, theirs + params)[len(others) :] == reference
    for i in (0, 3, 6):
        assert ask(plain, [prompts[i]], [params[i]]) == [reference[i]]


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_seeded_text_does_not_depend_on_the_rule_and_one_request_alone_has_it_too(dspark, reference, rule):
    dspark.configure(verify_mode="static", min_window=0, max_window=None, accept_rule=rule)
    prompts, params = seeded_cases()
    for i in (1, 4, 7, 11):
        assert ask(dspark, [prompts[i]], [params[i]]) == [reference[i]]
    dspark.configure(accept_rule="block")


@pytest.mark.parametrize("mode", ["static", "off"])
def test_choice_i_of_n_is_the_text_of_seed_plus_i(dspark, plain, mode):
    dspark.configure(verify_mode=mode, min_window=0, max_window=None)
    for server in (dspark, plain):
        params = {"sampling_seed": 40, "max_new_tokens": LENGTH, "temperature": 1.0}
        both = server.post("/generate", {"text": PROMPTS[:2], "sampling_params": [{**params, "n": 3}] * 2})
        single = [ask(server, [p], [{"sampling_seed": 40 + i}])[0] for p in PROMPTS[:2] for i in range(3)]
        assert [answer["output_ids"] for answer in both] == single
        assert len({tuple(ids) for ids in single}) == 6


def test_the_openai_seed_numbers_choices_too(dspark, plain):
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "The river"}],
        "seed": 5,
        "max_tokens": 12,
        "temperature": 1.0,
    }
    three = dspark.post("/v1/chat/completions", {**body, "n": 3})["choices"]
    assert [c["index"] for c in three] == [0, 1, 2]
    for i, choice in enumerate(three):
        alone = plain.post("/v1/chat/completions", {**body, "seed": 5 + i})["choices"][0]
        assert choice["message"]["content"] == alone["message"]["content"]


def test_unseeded_requests_differ_even_with_the_same_request_id(dspark, plain):
    dspark.configure(verify_mode="static", min_window=0, max_window=None)
    for server in (dspark, plain):
        texts = [
            server.post(
                "/generate", {"text": "The river ran", "rid": "mine", "sampling_params": {"max_new_tokens": LENGTH}}
            )["text"]
            for _ in range(3)
        ]
        assert len(set(texts)) == 3


def test_logprobs_of_seeded_tokens_are_those_of_the_tokens_that_were_drawn(dspark, plain):
    dspark.configure(verify_mode="static", min_window=0, max_window=None)
    body = {
        "text": "The river ran",
        "return_logprob": True,
        "top_logprobs_num": 3,
        "sampling_params": {"max_new_tokens": LENGTH, "temperature": 1.0, "sampling_seed": 3},
    }
    ours, theirs = (server.post("/generate", body)["meta_info"]["output_token_logprobs"] for server in (dspark, plain))
    assert [t[1] for t in ours] == [t[1] for t in theirs]
    assert [t[0] for t in ours] == pytest.approx([t[0] for t in theirs], abs=1e-4)
