"""Logit processors of a user's own, sent with a request."""

from __future__ import annotations

import json

import dill
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor


def by_value(processor: type) -> str:
    """Serialise a processor of this file so that a server which cannot import it can run it."""
    processor.__module__ = processor.__call__.__module__ = "__main__"
    return json.dumps({"callable": dill.dumps(processor, recurse=True).hex()})


class Counting(CustomLogitProcessor):
    """Allows only tokens that depend on how many were emitted: state that a block cannot see."""

    def __call__(self, logits, custom_param_list=None):
        for row, params in enumerate(custom_param_list):
            shift = len(params["__req__"].output_ids)
            logits[row, (7 + 3 * shift) % 400 :: 11] += 30.0
        return logits


class Overwriting(CustomLogitProcessor):
    """Has the last word: whatever penalties, grammar and bias said, one token remains."""

    def __call__(self, logits, custom_param_list=None):
        for row, params in enumerate(custom_param_list):
            logits[row] = -100.0
            logits[row, params["token"]] = 100.0
        return logits
