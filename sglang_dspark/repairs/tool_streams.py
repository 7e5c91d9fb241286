"""A streamed tool call is split where its text says, however many tokens a step commits.

The engine's tool parsers read a stream in pieces and make at most one event of each. A piece that holds the end of the
text and the beginning of a call loses that text, and one that holds the end of a call and another whole call leaves the
second for a next piece, which may not come. One token at a time, neither happens; here the text is taken off before, and
the parser is asked again until nothing more is in the piece. This holds for the parsers that leave the reading of a stream
to their base class (`qwen`, `qwen25`, `trinity`, `llama3`, and the one of required and named calls).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_dspark.contract.hooks import AROUND, Hook

if TYPE_CHECKING:
    from sglang.srt.function_call.base_format_detector import BaseFormatDetector
    from sglang.srt.function_call.core_types import StreamingParseResult


def _whole_piece(original, detector: BaseFormatDetector, new_text: str, tools) -> StreamingParseResult:
    """The parser's result for `new_text`: the text before the first call, and all events that are in it. Text behind a call
    is none of the answer, as where it is not streamed."""
    from sglang.srt.function_call.core_types import StreamingParseResult

    behind_a_call = detector.current_tool_id > 0
    text, rest = _before_the_first_call(detector, new_text)
    found = original(detector, rest, tools)
    if not behind_a_call:
        text += found.normal_text
    calls = list(found.calls)
    while found.calls:
        found = original(detector, "", tools)
        calls.extend(found.calls)
    return StreamingParseResult(normal_text=text, calls=calls)


def _before_the_first_call(detector: BaseFormatDetector, new_text: str) -> tuple[str, str]:
    """Text that stands before the first call, where that begins in `new_text`, and what is left to parse."""
    pending = detector._buffer + new_text
    start = pending.find(detector.bot_token)
    began = detector.current_tool_id > 0 or detector.current_tool_name_sent or detector.has_tool_call(pending[:start])
    if start <= 0 or began:
        return "", new_text
    detector._buffer = ""
    return pending[:start].replace(detector.eot_token, ""), pending[start:]


_PARSERS = ("qwen25_detector:Qwen25Detector", "llama32_detector:Llama32Detector", "json_array_parser:JsonArrayParser")
HOOKS = tuple(
    Hook(f"sglang.srt.function_call.{parser}.parse_streaming_increment", AROUND, _whole_piece, ("new_text", "tools"))
    for parser in _PARSERS
)
