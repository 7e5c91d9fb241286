"""Hooks that the servers of this suite cannot reach or only by chance, held to plain rules on small objects.

Bug class: overlap scheduling, which no CPU server runs, starting a step before the last one's tokens can be penalised;
a choice of n that takes another one's seed; an end that is looked for behind the grammar's own; a key that nobody reads;
a start whose requests pass our checks by.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dspark.commands.preflight import plan_start
from sglang_dspark.engine.algorithm import DSparkLoadAware
from sglang_dspark.repairs.finish import _one_by_one
from sglang_dspark.repairs.seeding import Choices
from sglang_dspark.repairs.unread_keys import known_keys, reason_to_refuse
from sglang_dspark.settings.config import ConfigError
from sglang_dspark.step.adjust import _waits_for_output


def _request(**params) -> SimpleNamespace:
    return SimpleNamespace(sampling_params=SamplingParams(**params), output_ids=[5], custom_logit_processor=None)


@pytest.mark.parametrize(
    ("params", "waits"),
    [
        ({}, False),
        ({"frequency_penalty": 1.0}, True),
        ({"min_new_tokens": 3}, True),
        ({"min_new_tokens": 1}, False),
        ({"repetition_penalty": 1.1}, True),
    ],
)
def test_a_step_waits_for_the_last_ones_tokens_only_where_its_logits_depend_on_them(params, waits):
    batch = SimpleNamespace(
        spec_algorithm=SimpleNamespace(is_none=lambda: False),
        reqs=[_request(), _request(**params)],
        forward_mode=SimpleNamespace(is_decode=lambda: True),
    )
    assert _waits_for_output(False, SimpleNamespace(result_queue=[1]), batch, None) is waits
    assert _waits_for_output(False, SimpleNamespace(result_queue=[]), batch, None) is False
    assert _waits_for_output(True, SimpleNamespace(result_queue=[]), batch, None) is True


def test_choices_take_seed_plus_i_and_two_groups_do_not_mix():
    choices = Choices()
    groups = [SamplingParams(n=3, sampling_seed=seed, temperature=1.0) for seed in (10, 2**63 - 1)]
    sent = [SimpleNamespace(sampling_params=group) for _ in range(3) for group in groups]
    warm = SimpleNamespace(sampling_params=SamplingParams(n=3, sampling_seed=10, max_new_tokens=0))
    choices.number(None, warm)
    for request in sent:
        choices.number(None, request)
    assert warm.sampling_params.sampling_seed == 10
    assert [r.sampling_params.sampling_seed for r in sent[::2]] == [10, 11, 12]
    assert [r.sampling_params.sampling_seed for r in sent[1::2]] == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert not choices._sent and [g.sampling_seed for g in groups] == [10, 2**63 - 1]


def test_the_first_end_of_a_run_is_the_end_and_the_grammar_speaks_about_the_last_token_only():
    request = SimpleNamespace(output_ids=[1, 2, 3, 4], grammar="over", finished_len=None, to_finish=None, reason=None)
    request.finished = lambda: request.reason is not None
    seen = []

    def check(req, count):
        seen.append((list(req.output_ids), req.grammar, count))
        if req.output_ids[-1] == 3:
            req.reason = "stop"

    _one_by_one(check, request, 3)
    assert seen == [([1, 2], None, 1), ([1, 2, 3], None, 1)]
    assert request.output_ids == [1, 2, 3, 4] and request.grammar == "over" and request.finished_len == 3


@pytest.mark.parametrize(
    ("body", "known", "inner", "words"),
    [
        ({"text": "A", "temperature": 0}, {"text"}, "sampling_params", "temperature .* put it into sampling_params"),
        ({"dspark": {}}, {"text"}, "sampling_params", "dspark .* sampling_params.custom_params"),
        ({"dspark": {}}, {"custom_params"}, None, "put it into custom_params"),
        ({"dspark": {}}, set(), None, "another route"),
        ({"max_new_tokens": 1}, {"max_tokens"}, None, "called max_tokens"),
        ({"seed": 1}, set(), None, "seed .* leave it out"),
        ({"regex": "a", "ebnf": "b"}, {"regex"}, None, "^ebnf"),
    ],
)
def test_a_key_that_its_route_does_not_read_is_named_with_its_place(body, known, inner, words):
    assert re.search(words, reason_to_refuse(body, known, inner))


@pytest.mark.parametrize("body", [{"colour": 1}, {"seed": None}, {"temperature": 1}, {}, [1], "text"])
def test_other_keys_and_nulls_are_left_alone(body):
    assert reason_to_refuse(body, {"temperature"}) is None


def test_a_route_that_draws_no_tokens_has_nothing_to_drop():
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, EmbeddingRequest

    assert reason_to_refuse({"temperature": 1}, known_keys(EmbeddingRequest)) is None
    assert "dspark" not in known_keys(ChatCompletionRequest)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tokenizer-worker-num", "2"], "--tokenizer-worker-num 2: .* leave the flag out"),
        (["--smg-grpc-mode"], "--smg-grpc-mode: .* leave the flag out"),
    ],
)
def test_a_start_whose_requests_would_not_be_checked_is_refused_with_one_line(flags, words):
    for mode in ([], ["--verify-mode", "off"]):
        with pytest.raises(ConfigError, match=words) as refusal:
            plan_start(["/no/such/model", *mode, *flags])
        assert "\n" not in str(refusal.value)


def test_the_engine_refuses_such_a_start_too_before_it_looks_for_a_draft():
    arguments = SimpleNamespace(
        tokenizer_worker_num=3, smg_grpc_mode=False, grpc_mode=False, speculative_draft_model_path=None
    )
    with pytest.raises(ConfigError, match="--tokenizer-worker-num 3"):
        DSparkLoadAware.handle_server_args(None, arguments)
