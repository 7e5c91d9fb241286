"""A stop pattern ends its own request, by a match or by taking too long, and never holds the step.

Bug classes: a search without a deadline, a deadline per search that a pattern can stay just below at every token, and
stop strings or patterns that no longer stop what they stopped.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from sglang.srt.managers import schedule_batch  # noqa: F401 (its import takes seconds, and the first test takes the time)

from sglang_dspark.repairs import stop_patterns

SLOW = r"(?:.|..)+\d{9}$"
TEXT = "the river ran past the mill and every morning the miller counted the sacks"


def request(patterns: list[str], strings: tuple[str, ...] = (), tokens: int = 3) -> SimpleNamespace:
    params = SimpleNamespace(stop_regex_strs=patterns, stop_strs=strings)
    return SimpleNamespace(
        sampling_params=params, output_ids=[0] * tokens, finished_reason=None, finished_len=None, rid="r",
        tail_str=lambda count: TEXT,
    )  # fmt: skip


def engines_own(req, new_accepted_len=1) -> bool:
    """Stop strings, as the engine checks them; patterns must be none of its business."""
    assert req.sampling_params.stop_regex_strs == []
    return any(text in TEXT for text in req.sampling_params.stop_strs)


def test_a_pattern_that_takes_too_long_ends_the_request_with_a_400():
    req, began = request(["absent", SLOW]), time.thread_time()
    assert stop_patterns._check_strings(engines_own, req)
    assert time.thread_time() - began < 1
    assert req.finished_reason.status_code == 400 and "stop_regex" in req.finished_reason.message
    assert req.sampling_params.stop_regex_strs == ["absent", SLOW]


def test_a_pattern_that_is_a_little_too_slow_every_time_ends_the_request_too(monkeypatch):
    def slow(pattern, text, timeout):
        wanted = stop_patterns.FIRST / 3
        end = time.thread_time() + min(wanted, timeout)
        while time.thread_time() < end:
            pass
        if timeout < wanted:
            raise TimeoutError

    monkeypatch.setattr(stop_patterns.regex, "search", slow)
    req = request(["any"])
    ended = [stop_patterns._check_strings(engines_own, req) for _ in range(4)]
    assert ended == [False, False, False, True]
    fast = request(["any"], tokens=1000)
    assert not any(stop_patterns._check_strings(engines_own, fast) for _ in range(20))


@pytest.mark.parametrize(("patterns", "strings", "stopped"), [
    ([r"mil+er"], (), "pattern"), (["absent", r"s\w+ks$"], (), "pattern"), (["absent"], ("mill",), "string"),
    (["absent"], (), None), ([r"mil+er"], ("mill",), "string"),
])  # fmt: skip
def test_patterns_and_strings_stop_what_they_stopped(patterns, strings, stopped):
    req = request(patterns, strings)
    assert stop_patterns._check_strings(engines_own, req) == (stopped is not None)
    assert (req.finished_len == 3) == (stopped == "pattern")


def test_a_request_without_patterns_is_the_engines():
    assert stop_patterns._check_strings(lambda *args: args, marked := request([], ("x",)), 2) == (marked, 2)
