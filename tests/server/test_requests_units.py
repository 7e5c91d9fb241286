"""Hooks that the servers of this suite cannot reach or only by chance, held to plain rules on small objects.

Bug class: overlap scheduling, which no CPU server runs, starting a step before the last one's tokens can be penalised;
a choice of n that takes another one's seed; an end that is looked for behind the grammar's own.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dspark.adjust import _waits_for_output
from sglang_dspark.ends import _one_by_one
from sglang_dspark.seeding import Choices


def _request(**params) -> SimpleNamespace:
    return SimpleNamespace(sampling_params=SamplingParams(**params), output_ids=[5], custom_logit_processor=None)


@pytest.mark.parametrize(("params", "waits"), [({}, False), ({"frequency_penalty": 1.0}, True), ({"min_new_tokens": 3}, True),
                                               ({"min_new_tokens": 1}, False), ({"repetition_penalty": 1.1}, True)])
def test_a_step_waits_for_the_last_ones_tokens_only_where_its_logits_depend_on_them(params, waits):
    batch = SimpleNamespace(spec_algorithm=SimpleNamespace(is_none=lambda: False), reqs=[_request(), _request(**params)],
                            forward_mode=SimpleNamespace(is_decode=lambda: True))
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
