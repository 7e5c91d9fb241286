"""What happens to a request besides decoding: retraction, preemption, aborts, disconnects, slot reuse, refusals, clients.

Bug class: state of a request that outlives it or dies before it: draft KV or coins after a retraction, penalties that
forget what was emitted, slots that an aborted block keeps, a next request that starts with the last one's leftovers. The
engine checks its pools when it is idle and ends the process on a leak, so a leak also shows as a dead server.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.engine.tiny import PROMPTS
from tests.server.cases import LOGPROBS, generate, sampled
from tests.server.compare import answers, ask, differences
from tests.server.live import start
from tests.server.modes import CAUSAL, STATIC


@pytest.fixture(scope="module")
def strained(pair, tmp_path_factory):
    """A speculating server that retracts requests all the time, has few slots, priorities, and hidden states on."""
    target, draft = pair
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_TEST_RETRACT", "1")
        server = start(
            tmp_path_factory.mktemp("logs") / "strained.log",
            "--model-path",
            str(target),
            "--speculative-draft-model-path",
            str(draft),
            "--verify-mode",
            "static",
            "--enable-priority-scheduling",
            "--max-running-requests",
            "6",
            "--enable-return-hidden-states",
        )
    yield server
    server.kill()


def _retracted_cases() -> list:
    return [
        *(generate(f"greedy-{i}", i, 30) for i in range(5)),
        *(sampled(f"seeded-{i}", i) for i in range(5)),
        generate("frequency", 6, 30, frequency_penalty=1.5),
        generate("repetition", 7, 30, repetition_penalty=1.5),
        generate("presence", 8, 30, presence_penalty=1.5),
        generate("logprobs", 9, 30, extra={**LOGPROBS, "logprob_start_len": -1}),
        generate("min", 10, 30, min_new_tokens=20, stop_token_ids=list(range(6, 250))),
        generate("grammar", 11, 30, regex="[a-z]{20}"),
    ]


def test_retracted_requests_go_on_as_if_nothing_had_happened(strained, plain):
    cases = _retracted_cases()
    theirs = answers(plain.url, cases)
    for settings in (STATIC, CAUSAL, {**CAUSAL, "verify_mode": "cap-accept"}):
        strained.configure(**settings)
        ours = answers(strained.url, cases, concurrency=len(cases))
        assert sum(answer["meta_info"]["num_retractions"] for _, answer in ours.values()) > 5, "nothing was retracted"
        assert not {name: found for name in theirs if (found := differences(ours[name], theirs[name]))}
        for _, answer in ours.values():
            m = answer["meta_info"]
            returned = (
                m["spec_num_correct_drafts"] + m["spec_verify_ct"] + 1 + m["num_retractions"] - m["spec_num_cut_tokens"]
            )
            assert returned == m["completion_tokens"] and m["spec_num_cut_tokens"] >= 0


def test_a_request_that_is_preempted_by_a_more_important_one_keeps_its_text(strained, plain):
    strained.configure(**STATIC)
    cases = [generate(f"p{i}", i, 40, extra={"priority": 100 * (i >= 8)}) for i in range(12)]
    ours, theirs = answers(strained.url, cases, concurrency=12), answers(plain.url, cases)
    assert not {name: found for name in theirs if (found := differences(ours[name], theirs[name]))}


@pytest.mark.parametrize("asked", [{"return_hidden_states": True}, {"return_sampling_mask": True}])
def test_what_speculation_cannot_return_is_a_400_with_the_reason(strained, asked):
    body = {"text": "A", "sampling_params": {"max_new_tokens": 5, "top_k": 5}, **asked}
    assert "--verify-mode off" in str(strained.post("/generate", body, expect=400))


def test_beam_search_and_images_are_400s_with_the_reason(dspark, plain):
    beam = {"text": "A", "sampling_params": {"max_new_tokens": 5, "beam_width": 3}}
    assert "speculative" in str(dspark.post("/generate", beam, expect=400))
    image = {"text": "A", "image_data": "data:image/png;base64,AAAA", "sampling_params": {"max_new_tokens": 5}}
    for server in (dspark, plain):
        assert "text only" in str(server.post("/generate", image, expect=400))


CHAT = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "A"}]}
DECLINED = {"dspark": {"enabled": False}}


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/generate", {"text": "A", "temperature": 0.5}, "temperature"),
        ("/generate", {"text": "A", **DECLINED}, "sampling_params.custom_params"),
        ("/generate", {"text": "A", "stream": True, "custom_params": DECLINED}, "custom_params"),
        ("/generate", {"text": "A", "sampling_params": {"colour": 1}}, "colour"),
        ("/generate", {"text": "A", "sampling_params": {"custom_params": {"DSPARK": {}}}}, "written dspark"),
        ("/generate", {"text": "A", "sampling_params": {"custom_params": [1]}}, "custom_params"),
        (
            "/generate",
            {"text": "A", "custom_logit_processor": json.dumps({"callable": "00ff"})},
            "custom_logit_processor",
        ),
        ("/v1/chat/completions", {**CHAT, **DECLINED}, "custom_params"),
        ("/v1/chat/completions", {**CHAT, "stream": True, "sampling_seed": 3}, "called seed"),
        ("/v1/completions", {"model": "m", "prompt": "A", "max_new_tokens": 3}, "called max_tokens"),
        ("/v1/messages", {**CHAT, "custom_params": DECLINED}, "custom_params"),
        ("/v1/responses", {"model": "m", "input": "A", "seed": 3}, "seed"),
        ("/api/generate", {"model": "m", "prompt": "A", "stream": False, "temperature": 0}, "options"),
    ],
)
def test_what_a_route_would_not_read_is_a_400_that_names_it(dspark, plain, path, body, word):
    for server in (dspark, plain):
        assert word in str(server.post(path, body, expect=400))


def test_keys_that_mean_nothing_to_sampling_are_left_to_the_engine(dspark):
    """A null asks for nothing, and what the engine ignores for every request it still does."""
    dspark.post("/generate", {"text": "A", "colour": 1, "temperature": None, "sampling_params": {"max_new_tokens": 1}})
    dspark.post("/v1/chat/completions", {**CHAT, "colour": 1, "sampling_seed": None})
    assert dspark.post(
        "/v1/embeddings", {"model": "m", "input": "A", "temperature": 1}, expect=400
    )  # no embedding model


def _abandon(url: str, i: int) -> None:
    """Read two chunks of a long stream and hang up."""
    body = {
        "text": PROMPTS[i % 20],
        "stream": True,
        "sampling_params": {"max_new_tokens": 400, "temperature": 1.0, "ignore_eos": True},
    }
    with httpx.stream("POST", url + "/generate", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        for _ in range(3):
            next(lines, None)


def _abort(url: str, i: int) -> None:
    """Abort a long request by its id while it runs."""
    body = {
        "text": PROMPTS[i % 20],
        "rid": f"abort-{i}",
        "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True},
    }
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(httpx.post, url + "/generate", json=body, timeout=60)
        while not running.done():
            httpx.post(url + "/abort_request", json={"rid": f"abort-{i}"}, timeout=60)
        answer = running.result()
    assert answer.status_code >= 400 or answer.json()["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("settings", [STATIC, CAUSAL], ids=["static", "compact"])
def test_aborted_and_abandoned_requests_leave_nothing_behind(dspark, plain, settings):
    dspark.configure(**settings)
    cases = [generate(f"after-{i}", i, 20) for i in range(8)] + [sampled(f"after-seeded-{i}", i) for i in range(4)]
    with ThreadPoolExecutor(12) as pool:
        waiting = [pool.submit(_abandon if i % 3 else _abort, dspark.url, i) for i in range(12)]
        amid = answers(dspark.url, cases)
        for future in waiting:
            future.result()
    after, theirs = answers(dspark.url, cases), answers(plain.url, cases)
    for ours in (amid, after):
        assert not {name: found for name in theirs if (found := differences(ours[name], theirs[name]))}


def test_no_kv_slot_is_lost(dspark):
    dspark.configure(**CAUSAL)
    held = []
    for _ in range(2):
        answers(dspark.url, [generate(f"g-{i}", i, 24, stop=["e"]) for i in range(12)])
        assert httpx.post(dspark.url + "/flush_cache", timeout=60).status_code == 200
        answers(dspark.url, [generate("one", 0, 8)])
        loads = dspark.get("/v1/loads")["loads"][0]
        held.append((loads["num_used_tokens"], loads["token_usage"]))
        assert httpx.post(dspark.url + "/flush_cache", timeout=60).status_code == 200
    assert held[0] == held[1]
    assert "leak" not in dspark.log.read_text(errors="replace")
    # The whole pool can still be used: one prompt that needs nearly all slots a request may have.
    dspark.post(
        "/generate", {"input_ids": [7 + i % 500 for i in range(2000)], "sampling_params": {"max_new_tokens": 8}}
    )


def test_a_prefix_hit_accepts_as_many_drafts_as_a_cold_prompt(dspark):
    dspark.configure(**STATIC)
    prompts = [[6 + (17 * i * i + k) % 500 for i in range(300)] for k in range(8)]

    def accepted() -> tuple[int, int]:
        out = dspark.post(
            "/generate",
            {"input_ids": prompts, "sampling_params": {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}},
        )
        return (
            sum(a["meta_info"]["spec_num_correct_drafts"] for a in out),
            sum(a["meta_info"]["cached_tokens"] for a in out),
        )

    httpx.post(dspark.url + "/flush_cache", timeout=60)
    (cold, none), (warm, cached) = accepted(), accepted()
    assert cached > 2000 > none
    assert warm == pytest.approx(cold, rel=0.05)


def test_a_session_goes_on_where_it_was(dspark, plain):
    dspark.configure(**STATIC)

    def talk(server) -> list:
        session = server.post("/open_session", {"capacity_of_str_len": 2000})
        said, rid = [], None
        for turn in range(3):
            body = {
                "input_ids": [60 + turn, 70, 80],
                "session_params": {"id": session, "rid": rid},
                "sampling_params": {"temperature": 0, "max_new_tokens": 12},
            }
            answer = server.post("/generate", body)
            rid = answer["meta_info"]["id"]
            said.append(answer["output_ids"])
        httpx.post(server.url + "/close_session", json={"session_id": session}, timeout=60)
        return said

    assert talk(dspark) == talk(plain)


def test_the_openai_client_is_served_alike(dspark, plain):
    dspark.configure(**STATIC)
    messages = [{"role": "user", "content": PROMPTS[1]}]

    def everything(server) -> list:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
        one = client.chat.completions.create(
            model="m", messages=messages, temperature=0, max_tokens=16, logprobs=True, top_logprobs=2
        )
        stream = client.chat.completions.create(
            model="m",
            messages=messages,
            temperature=0,
            max_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == one.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == one.usage.completion_tokens
        plain_text = client.completions.create(
            model="m", prompt=PROMPTS[2], temperature=0.7, seed=5, max_tokens=16, n=2
        )
        return [
            text,
            one.usage.model_dump(),
            [t.model_dump() for t in one.choices[0].logprobs.content],
            [c.text for c in plain_text.choices],
            [c.finish_reason for c in plain_text.choices],
        ]

    assert not differences(everything(dspark), everything(plain))


def test_new_weights_are_taken_over_while_serving(dspark, plain, pair):
    dspark.configure(**STATIC)
    answer = dspark.post("/update_weights_from_disk", {"model_path": str(pair[0])})
    assert answer["success"], answer
    case = generate("after-update", 3, 20)
    assert not differences(ask(dspark.url, case), ask(plain.url, case))
