"""The same text in every verify mode and window policy: greedy and seeded, alone and in a crowd.

Bug class: a window, cap or pack that lets a token through which plain decoding would not emit. One wrong row index,
position, KV slot or stale draft KV moves the text of a sharp random model within a few tokens; a lost coin moves the
seeded one.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engine.tiny import PROMPTS
from tests.server.modes import EVERY_POLICY
from tests.server.test_requests_seeded import ask, neighbours, seeded_cases

CASES = [f"{prompt} {i}" for i, prompt in enumerate(PROMPTS)]
GREEDY = {"temperature": 0.0, "max_new_tokens": 24}


def answers(server) -> list[list[int]]:
    return ask(server, CASES, [GREEDY] * len(CASES))


@pytest.fixture(scope="module")
def greedy(plain):
    return answers(plain)


@pytest.fixture(scope="module")
def seeded(plain):
    return ask(plain, *seeded_cases())


@pytest.mark.parametrize("mode", EVERY_POLICY.values(), ids=EVERY_POLICY)
def test_greedy_and_seeded_text_is_plain_decodings_in_every_mode(dspark, greedy, seeded, mode):
    """In one batch, beside unseeded neighbours; and one greedy request alone."""
    dspark.configure(**mode)
    before = dspark.get("/dspark/status")["ranks"][0]["tokens"]
    (prompts, params), (others, theirs) = seeded_cases(), neighbours()
    every = [*[GREEDY] * len(CASES), *params, *theirs]
    found = ask(dspark, [*CASES, *prompts, *others], every)
    assert found[: len(CASES)] == greedy
    assert found[len(CASES) :][: len(prompts)] == seeded
    assert ask(dspark, CASES[:1], [GREEDY]) == greedy[:1]
    after = dspark.get("/dspark/status")["ranks"][0]["tokens"]
    accepted = after["accepted"] - before["accepted"]
    assert accepted == 0 if mode["verify_mode"] == "off" else accepted > 20, "the mode was not exercised"


def test_settings_change_under_load_without_dropping_a_request_or_changing_its_text(dspark, greedy):
    with ThreadPoolExecutor(1) as background:
        running = background.submit(answers, dspark)
        for mode in [*EVERY_POLICY.values()] * 2:
            dspark.configure(**mode)
        assert running.result() == greedy


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"verify_mode": "fast"}, "verify_mode"),
        ({"colour": 1}, "colour"),
        ({"max_window": 9}, "--max-window"),
        ({"max_window": "two"}, "max_window"),
        ({"calibration": "off"}, "calibration"),
    ],
)
def test_a_setting_that_cannot_be_is_a_400_that_names_it_and_changes_nothing(dspark, body, word):
    before = dspark.get("/dspark/status")["ranks"][0]["config"]
    assert word in dspark.post("/dspark/config", body, expect=400)["error"]["message"]
    assert dspark.get("/dspark/status")["ranks"][0]["config"] == before


def test_a_mode_is_switched_by_its_name_alone_whatever_settings_the_last_one_had(dspark):
    """Catches a route that checks the new mode together with settings of the old one, which the switch itself drops."""
    dspark.configure(verify_mode="compact", window_policy="causal", min_window=1, max_step_ms=500)
    for mode in ("static", "off", "compact"):
        answer = dspark.post("/dspark/config", {"verify_mode": mode})
        assert answer["config"]["verify_mode"] == mode and answer["config"]["window_policy"] is None
        assert answer["config"] == dspark.get("/dspark/status")["ranks"][0]["config"]


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"enabled": "no"}, "enabled"),
        ({"windows": 2}, "windows"),
        ({"min_window": 3, "max_window": 1}, "min_window"),
        ({"max_window": -1}, "max_window"),
        (7, "dspark"),
    ],
)
def test_a_bad_request_setting_is_a_400_that_names_it(dspark, settings, word):
    body = {"text": "A", "sampling_params": {"max_new_tokens": 4, "custom_params": {"dspark": settings}}}
    assert word in str(dspark.post("/generate", body, expect=400))


def test_a_request_that_declines_speculation_is_decoded_plainly(dspark, plain):
    dspark.configure(verify_mode="static", min_window=0, max_window=None)
    off = {"custom_params": {"dspark": {"enabled": False}}}
    answer = dspark.generate("The river ran", temperature=0, max_new_tokens=20, **off)[0]
    assert answer["meta_info"]["spec_num_correct_drafts"] == 0
    assert answer["output_ids"] == plain.generate("The river ran", temperature=0, max_new_tokens=20)[0]["output_ids"]
