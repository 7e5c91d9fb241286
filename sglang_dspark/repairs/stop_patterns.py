"""A client's stop pattern is matched with a deadline, so that it cannot hold the step in which everybody decodes.

The engine searches the text for every pattern in every step, in the scheduler's one thread, with Python's `re`, which can
take for ever on a few characters (`(a|aa)+$`). Here `regex`, which reads the same patterns, is given a time that grows
with the output; a request whose patterns need more ends with a 400 that says so.
"""

from __future__ import annotations

import logging
import time
from http import HTTPStatus
from typing import TYPE_CHECKING

import regex

from sglang_dspark.contract.hooks import AROUND, Hook

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)
# Seconds of this thread that a request's searches may take: at its first token, and more for each. An ordinary search
# takes microseconds.
FIRST, PER_TOKEN = 0.05, 0.001
SPENT = "dspark_pattern_seconds"


def _check_strings(original, req: Req, new_accepted_len: int = 1) -> bool:
    """Whether a stop string or pattern ends the request. A step's tokens are shown one by one (`finish`), so the text up to
    the last one is all that a pattern is asked about."""
    patterns = req.sampling_params.stop_regex_strs
    if not patterns:
        return original(req, new_accepted_len)
    from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISHED_MATCHED_REGEX

    text = req.tail_str(new_accepted_len)
    req.sampling_params.stop_regex_strs = []
    try:
        if original(req, new_accepted_len):
            return True
    finally:
        req.sampling_params.stop_regex_strs = patterns
    began, spent = time.thread_time(), getattr(req, SPENT, 0.0)
    allowed = FIRST + PER_TOKEN * len(req.output_ids)
    for pattern in patterns:
        left = allowed - spent - (time.thread_time() - began)
        try:
            matched = regex.search(pattern, text, timeout=max(left, 1e-6))
        except TimeoutError:
            reason = f"stop_regex {pattern!r} takes longer to match than {1000 * allowed:.0f} ms: simplify it"
            logger.warning("request %s ended: %s", req.rid, reason)
            req.finished_reason = FINISH_ABORT(reason, HTTPStatus.BAD_REQUEST, "BadRequestError")
            return True
        if matched:
            req.finished_reason = FINISHED_MATCHED_REGEX(matched=pattern)
            req.finished_len = len(req.output_ids)
            return True
    setattr(req, SPENT, spent + time.thread_time() - began)
    return False


HOOKS = (
    Hook(
        "sglang.srt.managers.schedule_batch:Req._check_str_based_finish", AROUND, _check_strings, ("new_accepted_len",)
    ),
)
