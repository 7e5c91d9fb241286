"""Speculation is invisible: every request means under every verify mode what it means under plain decoding.

Bug class: anything that looks at a block where plain decoding looks at a token: penalties or masks once per block, ends
inside an accepted run, log-probabilities of another row, a grammar advanced by what was drafted, a cache that holds what
was never committed. Each case is a line in `cases.py`, asked of `--verify-mode off` and of each mode, all cases at once,
so that batches are mixed; answers are compared field by field, floats within 1e-4. Greedy and seeded requests in float32
must be equal to the letter, so one wrong token at one position is seen.
"""

from __future__ import annotations

import itertools

import pytest

from tests.engine.tiny import PROMPTS
from tests.server.cases import CASES, LOGPROBS, generate, sampled
from tests.server.compare import Case, answers, ask, differences
from tests.server.modes import MODES

CONTEXT = 2048
GAMMA = 4


@pytest.fixture(scope="module", params=MODES)
def mode(request, dspark):
    """The speculating server in one mode."""
    dspark.configure(**MODES[request.param])
    return request.param


@pytest.fixture(scope="module")
def reference(plain):
    """Answers of plain decoding by name; each case is asked once for all modes."""
    known: dict[str, object] = {}

    def ask_once(cases: list[Case]) -> dict[str, object]:
        assert len({case.name for case in cases}) == len(cases), "names must differ"
        known.update(answers(plain.url, [case for case in cases if case.name not in known]))
        return {case.name: known[case.name] for case in cases}

    return ask_once


@pytest.fixture(scope="module")
def theirs(reference):
    """Every case under plain decoding."""
    return reference(CASES)


@pytest.fixture(scope="module")
def ours(mode, dspark):
    """Every case under the mode, in mixed batches."""
    return answers(dspark.url, CASES)


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_a_request_means_the_same_with_and_without_speculation(ours, theirs, name):
    assert not differences(ours[name], theirs[name])


def _all_equal(cases: list[Case], dspark, reference) -> None:
    theirs, ours = reference(cases), answers(dspark.url, cases)
    wrong = {name: found for name in theirs if (found := differences(ours[name], theirs[name]))}
    assert not wrong


@pytest.fixture(scope="module")
def texts(plain):
    """Greedy ids of two prompts and the text of each id."""
    found = []
    for prompt in (0, 5):
        answer = ask(plain.url, generate("text", prompt, 16))[1]
        pieces = [plain.post("/v1/detokenize", {"model": "m", "tokens": [i]})["text"] for i in answer["output_ids"]]
        found.append((prompt, answer["output_ids"], pieces))
    return found


def _cut_cases(prompt: int, ids: list[int], pieces: list[str]) -> list[Case]:
    """An end of every kind at every position of the text, alone and where two ends compete for one run."""
    cases = []
    for i in range(len(ids) - 1):
        pair, name = pieces[i] + pieces[i + 1], f"{prompt}-{i}"
        cases.append(generate(f"id-{name}", prompt, extra=LOGPROBS, stop_token_ids=[ids[i]]))
        cases.append(generate(f"ids-{name}", prompt, stop_token_ids=[ids[i], ids[i + 1]]))
        cases.append(generate(f"length-{name}", prompt, i + 1, stop_token_ids=[ids[i + 1]]))
        if "\ufffd" in pair or not pair.strip():
            continue
        cases.append(generate(f"string-{name}", prompt, extra=LOGPROBS, stop=[pair]))
        cases.append(generate(f"late-first-{name}", prompt, stop=[pieces[i + 1], pieces[i]]))
        cases.append(generate(f"string-behind-id-{name}", prompt, stop=[pieces[i + 1]], stop_token_ids=[ids[i]]))
        cases.append(generate(f"kept-{name}", prompt, stop=[pair], no_stop_trim=True))
        cases.append(
            generate(
                f"regex-{name}",
                prompt,
                stop_regex=["[" + "".join(f"\\x{ord(c):02x}" for c in pair if ord(c) < 128) + "]+$"],
            )
        )
        cases.append(generate(f"streamed-{name}", prompt, extra={"stream": True, **LOGPROBS}, stop=[pair]))
    return cases


def test_an_end_of_any_kind_at_any_position_cuts_text_ids_logprobs_and_usage_alike(mode, dspark, reference, texts):
    _all_equal([case for text in texts for case in _cut_cases(*text)], dspark, reference)


def test_openai_stops_cut_alike_streamed_or_not(mode, dspark, reference, texts):
    prompt, _, pieces = texts[0]
    stops = sorted({a + b for a, b in itertools.pairwise(pieces) if "\ufffd" not in a + b})[:6]
    body = {"model": "m", "prompt": PROMPTS[prompt], "temperature": 0.0, "max_tokens": 24, "logprobs": 2}
    cases = [
        Case(f"{stop!r}-{stream}", {**body, "stop": stop, "stream": stream}, "/v1/completions")
        for stop in stops
        for stream in (False, True)
    ]
    _all_equal(cases, dspark, reference)


def test_prompts_that_end_near_the_context_limit_end_alike(mode, dspark, reference):
    ids = [6 + (7 * i * i + i) % 500 for i in range(CONTEXT)]
    cases = [
        generate(
            f"left-{left}-{length}", length=length, extra={"text": None, "input_ids": ids[: CONTEXT - left], **extra}
        )
        for left in range(1, GAMMA + 4)
        for length, extra in ((64, {}), (left + 1, LOGPROBS | {"logprob_start_len": -1}))
    ]
    _all_equal(cases, dspark, reference)


def test_prefixes_of_every_length_hit_the_cache_and_change_nothing(mode, dspark, reference):
    ids = [6 + (11 * i * i + 3 * i) % 500 for i in range(64)]
    dspark.post("/generate", {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 8}})
    cases = [
        generate(f"shared-{n}", extra={"text": None, "input_ids": ids[:n] + [100 + n]}, length=16)
        for n in range(1, 64, 4)
    ]
    _all_equal(cases, dspark, reference)
    answer = ask(dspark.url, cases[-1])[1]
    assert answer["meta_info"]["cached_tokens"] >= 60, "the prefix was not shared"


def test_a_prompt_in_chunks_is_decoded_alike(mode, dspark, reference):
    ids = [6 + (13 * i * i + 5 * i) % 500 for i in range(1300)]
    _all_equal(
        [
            generate(f"long-{n}", extra={"text": None, "input_ids": ids[:n], **LOGPROBS}, length=12)
            for n in (511, 512, 513, 1024, 1300)
        ],
        dspark,
        reference,
    )


def test_a_chat_of_many_turns_stays_the_same_and_hits_its_own_past(mode, dspark, plain):
    def talk(server) -> list[str]:
        messages, said = [], []
        for turn in range(6):
            messages.append({"role": "user", "content": PROMPTS[turn]})
            answer = server.post(
                "/v1/chat/completions", {"model": "m", "messages": messages, "temperature": 0.0, "max_tokens": 14}
            )
            said.append(answer["choices"][0]["message"]["content"])
            messages.append({"role": "assistant", "content": said[-1]})
        return said

    assert talk(dspark) == talk(plain)


def test_the_numbers_of_every_request_add_up(mode, dspark):
    cases = [
        *(generate(f"plain-{i}", i) for i in range(6)),
        *(sampled(f"sampled-{i}", i) for i in range(6)),
        generate("stop", stop_token_ids=list(range(100, 200))),
        generate("grammar", regex="[a-z]{5}"),
    ]
    for name, (status, answer) in answers(dspark.url, cases).items():
        m = answer["meta_info"]
        if m["completion_tokens"] == 1:
            continue
        returned = m["spec_num_correct_drafts"] + m["spec_verify_ct"] + 1 - m["spec_num_cut_tokens"]
        assert returned == m["completion_tokens"] == len(answer["output_ids"]), name
        assert 0 <= m["spec_num_correct_drafts"] <= m["spec_num_proposed_drafts"] <= GAMMA * m["spec_verify_ct"], name
        assert 0 <= m["spec_num_cut_tokens"] <= GAMMA
        assert m["spec_accept_rate"] * max(1, m["spec_num_proposed_drafts"]) == pytest.approx(
            m["spec_num_correct_drafts"]
        )
