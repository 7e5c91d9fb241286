"""What is wrong, as one line for whoever asked: the error that carries it, and what pydantic found in a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

# pydantic's kinds of error, in the words of somebody who edits JSON.
_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
}
_CUT = 80  # characters of a value that are shown


class UserError(ValueError):
    """What was asked for cannot be done. A command prints the message as one line and ends with status 2; on the way
    into a server the engine answers a request with 400."""


def first_fault(error: ValidationError) -> str:
    """The first fault of `error`: `key=value; it must be …`, or `key is missing`; a check's own words as they are."""
    fault = error.errors(include_url=False)[0]
    if fault["type"] == "value_error":  # raised by a check of ours, which has said it all
        return str(fault["ctx"]["error"])
    key = key_of(fault["loc"])
    if fault["type"] == "missing":
        return f"{key} is missing"
    if fault["type"] == "literal_error":
        choices = fault["ctx"]["expected"].replace("'", "").replace(" or ", ", ")
        return wrong_value(key, fault["input"], f"one of {choices}")
    expected = _EXPECTED.get(fault["type"])
    wanted = fault["msg"] if expected is None else expected.format(**fault.get("ctx", {}))
    return wrong_value(key, fault["input"], wanted)


def wrong_value(key: str, value: object, expected: str) -> str:
    """`key=value; it must be expected`, with a long value cut."""
    text = repr(value)
    shown = text if len(text) <= _CUT else text[:_CUT] + "…"
    return f"{key}={shown}; it must be {expected}"


def key_of(place: Sequence[str | int]) -> str:
    """`("a", "b", 1)` as `a.b[1]`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
