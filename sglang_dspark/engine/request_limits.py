"""How far a request may go: every field that becomes an index, a size or a compiled pattern, against the model's limits.

The engine hands most of these to the scheduler as they came, and there an index outside its range or a number that does
not fit ends the one process that serves everybody. Here each is a row: the field as `/generate` spells it (the other
routes' parameters arrive under the same names), what is allowed, and a test. A request outside a row is a 400 that names
the field, the value and the limit.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import regex

from sglang_dspark.contract.hooks import AROUND, BEFORE, Hook

INT32 = 2**31 - 1
MOST_CHOICES = 4096  # of one prompt; each is a request of its own
HOTTEST = 1e6  # a temperature; far above, masked logits become NaN when they are divided
SHORT_TEXT = 1 << 20  # characters; a text up to here is read in any case
DEEPEST = 64  # levels of a custom parameter
LONG_PATTERN = 256  # SGLang's limit in bytes
MOST_DIGITS = 40  # of a value that a message repeats


@dataclass(frozen=True)
class Request:
    """What the rows look at: one prompt of a request and the model's sizes.

    Args:
        fields: the engine's request object, of one prompt. sampling: its sampling parameters. ids: its prompt's tokens.
        vocabulary: rows of the model's embedding; tokens: one more than the tokenizer's highest id, at most as many.
    """

    fields: Any
    sampling: Mapping
    ids: list[int]
    vocabulary: int
    tokens: int

    @classmethod
    def of(cls, manager, obj, ids: list[int] | None) -> Request:
        """The fields to check of `obj`; `ids` are its prompt's tokens, None where it has no prompt of tokens."""
        vocabulary = manager.model_config.vocab_size
        tokens = min(vocabulary, extent_of(manager.tokenizer)[0] or vocabulary)
        return cls(obj, obj.sampling_params or {}, ids or [], vocabulary, tokens)


@dataclass(frozen=True)
class Limit:
    """One row.

    Args:
        field: as `/generate` spells it; `sampling_params.` stands before those that are inside.
        limit: what is allowed, for the message; `{0.vocabulary}` and the like are filled in from the request.
        within: whether one value is allowed, given the request.
        values: the values that a field's content stands for: itself, or its items.
    """

    field: str
    limit: str
    within: Callable[[Any, Request], bool]
    values: Callable[[Any], Iterable] = lambda content: (content,)

    def violation(self, request: Request) -> str | None:
        """The message for a request outside this row, or None."""
        name = self.field.removeprefix("sampling_params.")
        content = getattr(request.fields, name, None) if name == self.field else request.sampling.get(name)
        if content is None:
            return None
        for value in self.values(content):
            if not self.within(value, request):
                return f"{self.field} {_short(value)}: {self.limit.format(request)}"
        return None


def _short(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**MOST_DIGITS:
        return f"of {value.bit_length()} bits"  # Python refuses to print numbers of thousands of digits
    text = repr(value)
    return text if len(text) <= MOST_DIGITS else text[: MOST_DIGITS - 3] + "..."


def _between(low: float, high: float) -> Callable[[Any, Request], bool]:
    return lambda value, _: _is_whole(value) and low <= value <= high


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _in_vocabulary(value: object, request: Request) -> bool:
    return _is_whole(value) and 0 <= value < request.vocabulary


def _biased(value: tuple, request: Request) -> bool:
    token, bias = value
    return str(token).isdecimal() and int(token) < request.vocabulary and _is_finite(bias)


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _compiles(pattern: object, _: Request) -> bool:
    """Whether a stop pattern is one for both who read it: the engine bounds its length by `re`, and we match by `regex`."""
    if not isinstance(pattern, str):
        return False
    if len(pattern) > LONG_PATTERN:
        return True  # the engine refuses its length, and to read it would take long
    try:
        re.compile(pattern)
        regex.compile(pattern)
    except (re.error, regex.error, RecursionError, OverflowError, ValueError):
        return False
    return True


def _travels(value: object, _: Request) -> bool:
    """Whether a custom parameter survives the way to the scheduler: numbers of 64 bits, nested at most `DEEPEST` levels."""
    level = [value]
    for _depth in range(DEEPEST):
        if any(_is_whole(item) and not _fits(item) for item in level):
            return False
        nested = (
            item.values() if isinstance(item, Mapping) else item for item in level if isinstance(item, (Mapping, list))
        )
        level = [item for items in nested for item in items]
        if not level:
            return True
    return False


def _fits(value: object) -> bool:
    return _is_whole(value) and -(2**63) <= value < 2**63


def _session_reads(value: object, _: Request) -> bool:
    from sglang.srt.managers.io_struct import SessionParams

    return isinstance(value, Mapping) and value.keys() <= set(SessionParams.__struct_fields__)


def _many(content: object) -> Iterable:
    return content if isinstance(content, (list, tuple, set)) else (content,)


_VOCABULARY = "a token id is from 0 to below {0.vocabulary}, the model's vocabulary"
_COUNT = f"a number from 0 to {INT32}"

LIMITS = (
    Limit("sampling_params.max_new_tokens", _COUNT, _between(0, INT32)),
    Limit("sampling_params.min_new_tokens", _COUNT, _between(0, INT32)),
    Limit("sampling_params.top_k", f"-1 for all tokens, or 1 to {INT32}",
          lambda v, _: _is_whole(v) and (v == -1 or 1 <= v <= INT32)),
    Limit("sampling_params.temperature", f"a number from 0 to {HOTTEST:.0f}",
          lambda v, _: _is_finite(v) and 0 <= v <= HOTTEST),
    Limit("sampling_params.stream_interval", f"1 to {INT32} tokens", _between(1, INT32)),
    Limit("sampling_params.stop_token_ids", _VOCABULARY, _in_vocabulary, _many),
    Limit("sampling_params.logit_bias", _VOCABULARY + ", and a bias is a finite number", _biased,
          lambda content: content.items() if isinstance(content, Mapping) else ((content, None),)),
    Limit("sampling_params.stop_regex", "a regular expression that Python's re can read", _compiles, _many),
    Limit("sampling_params.custom_params", f"its numbers have 64 bits, and it is nested at most {DEEPEST} deep", _travels),
    Limit("top_logprobs_num", "0 to {0.vocabulary}, the model's vocabulary",
          lambda v, request: _is_whole(v) and 0 <= v <= request.vocabulary),
    Limit("token_ids_logprob", _VOCABULARY, _in_vocabulary, _many),
    Limit("logprob_start_len", "-1 for none of the prompt, or a position of it",
          lambda v, request: _is_whole(v) and -1 <= v <= len(request.ids)),
    Limit("multi_item_delimiter_indices", "positions of the prompt",
          lambda v, request: _is_whole(v) and 0 <= v < len(request.ids), _many),
    Limit("token_indices_to_pool", "positions of the prompt",
          lambda v, request: _is_whole(v) and 0 <= v < len(request.ids), _many),
    Limit("routed_experts_start_len", "a position of the prompt, or its length",
          lambda v, request: _is_whole(v) and 0 <= v <= len(request.ids)),
    Limit("positional_embed_overrides", "this cannot be sent as JSON; leave it out",
          lambda v, _: not isinstance(v, (bool, int, float, str, list, dict))),
    Limit("priority", f"a number from {-INT32} to {INT32}", _between(-INT32, INT32)),
    *(Limit(field, "one text for a prompt", lambda v, _: isinstance(v, str))
      for field in ("lora_id", "extra_key", "cache_salt", "bootstrap_host", "bootstrap_pair_key", "routing_key")),
    Limit("session_params", "an object with id, rid, offset and what else a session reads", _session_reads),
    Limit("bootstrap_room", "a number of 64 bits", lambda v, _: _fits(v)),
    Limit("bootstrap_port", "a port is a number from 0 to 65535", _between(0, 65535)),
)  # fmt: skip


def check(request: Request) -> None:
    """Raise ValueError, which the engine answers with a 400, for a request outside the table or without any prompt."""
    if not request.ids and request.fields.input_embeds is None and not request.fields.session_params:
        raise ValueError("the prompt is empty: send a text or at least one token id")
    for token in (min(request.ids, default=0), max(request.ids, default=0)):
        if not 0 <= token < request.tokens:
            raise ValueError(f"input_ids {_short(token)}: a token id is from 0 to below {request.tokens}")
    for row in LIMITS:
        if (message := row.violation(request)) is not None:
            raise ValueError(message)


def _refuse_long_texts(manager, texts, *args, **kwargs) -> None:
    """Runs before a text becomes tokens, which takes seconds for ten megabytes, in the one loop that answers everybody: a
    text of more characters than the context's tokens could hold is longer than the context."""
    _, longest = extent_of(manager.tokenizer)
    if manager.allow_auto_truncate or not longest:
        return
    most = max(SHORT_TEXT, manager.context_len * longest)
    for text in [texts] if isinstance(texts, str) else texts:
        if isinstance(text, str) and len(text) > most:
            raise ValueError(
                f"the prompt has {len(text)} characters: more than fit into the context of {manager.context_len} tokens"
            )


@functools.cache
def extent_of(tokenizer) -> tuple[int, int]:
    """One more than a tokenizer's highest id, and the characters of its longest entry; zeros where it does not tell."""
    entries = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    return max(entries.values(), default=-1) + 1, max(map(len, entries), default=0)


def _normalised(original, obj, *args, **kwargs) -> None:
    """Runs before anything else looks at a generation. Whatever the engine's reading of its fields raises is about them:
    lists that do not fit each other, or values of a type that the route's schema let pass."""
    many = obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params]
    for sampling in many:
        choices = sampling.get("n") if isinstance(sampling, Mapping) else None
        if choices is not None and not _between(1, MOST_CHOICES)(choices, None):
            raise ValueError(f"sampling_params.n {_short(choices)}: 1 to {MOST_CHOICES} choices of a prompt")
    try:
        original(obj, *args, **kwargs)
        if not obj.is_single:
            obj[obj.batch_size - 1]  # a list that is too short has nothing for the last prompt
        elif not isinstance(obj.rid, str):
            raise ValueError(f"rid {_short(obj.rid)}: one text for a prompt")
    except (TypeError, IndexError, KeyError, AttributeError) as error:
        raise ValueError(f"the request's fields do not fit each other ({type(error).__name__}: {error})") from error


def _check_one(manager, obj, input_ids) -> None:
    """Runs in the process that answers HTTP, for each prompt of each request, before it is queued."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    if isinstance(obj, GenerateReqInput):  # embeddings draw no tokens
        check(Request.of(manager, obj, input_ids))


HOOKS = (
    Hook("sglang.srt.managers.io_struct:GenerateReqInput.normalize_batch_and_arguments", AROUND, _normalised, ()),
    Hook(
        "sglang.srt.managers.tokenizer_manager:TokenizerManager._tokenize_texts",
        BEFORE,
        _refuse_long_texts,
        ("texts", "is_cross_encoder"),
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager:TokenizerManager._validate_one_request",
        BEFORE,
        _check_one,
        ("obj", "input_ids"),
    ),
)
