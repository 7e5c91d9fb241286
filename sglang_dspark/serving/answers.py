"""Answers as the clients of the OpenAI and Anthropic APIs expect them, where the engine says less than it knows.

Usage details that are null; `/v1/responses` that asks for two tokens less than the client; `/v1/messages` that does not
say which stop sequence ended it. Nothing that the engine's own clients read is taken away.
"""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator

from sglang_dspark.contract.hooks import AFTER, AROUND, Hook


def _with_cached(original, *args, **kwargs):
    """The tokens read from the prefix cache are known whether or not --enable-cache-report was given."""
    return original(*args, **{**kwargs, "enable_cache_report": True})


def _uncached(tokens: int, usage) -> int:
    """`/v1/messages` takes cached tokens off its input, which stays what --enable-cache-report decides."""
    from sglang.srt.runtime_context import get_serving

    return tokens if get_serving().enable_cache_report else 0


def _with_reasoning(usage, *args, **kwargs) -> None:
    from sglang.srt.entrypoints.openai.protocol import CompletionTokensDetails

    if usage.completion_tokens_details is None:
        usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens=usage.reasoning_tokens or 0)


def _whole_budget(params: dict, request, default_max_tokens=None, *args, **kwargs) -> None:
    """The engine holds two tokens back for a beginning and an end, which it then does not add."""
    if request.max_output_tokens is not None and default_max_tokens is None:
        params["max_new_tokens"] = request.max_output_tokens


def _with_stop_sequence(answer, serving, response) -> None:
    choice = response.choices[0] if response.choices else None
    if choice is not None and choice.finish_reason == "stop" and isinstance(choice.matched_stop, str):
        answer.stop_reason, answer.stop_sequence = "stop_sequence", choice.matched_stop


class _Watched:
    """The engine's chat, and the stop string that ended the stream which it made last."""

    def __init__(self, chat) -> None:
        self.chat, self.matched = chat, None

    def __getattr__(self, name: str):
        return getattr(self.chat, name)

    async def _generate_chat_stream(self, *args, **kwargs) -> AsyncIterator[str]:
        async for line in self.chat._generate_chat_stream(*args, **kwargs):
            if '"matched_stop":"' in line:
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                self.matched = choice["matched_stop"] if choice["finish_reason"] == "stop" else None
            yield line


async def _stream_with_stop_sequence(original, serving, *args, **kwargs) -> AsyncIterator[str]:
    watching = copy.copy(serving)
    watching.openai_serving_chat = watched = _Watched(serving.openai_serving_chat)
    async for event in original(watching, *args, **kwargs):
        if watched.matched is not None and event.startswith("event: message_delta\n"):
            reason = f'"stop_reason":"stop_sequence","stop_sequence":{json.dumps(watched.matched)}'
            event = event.replace('"stop_reason":"end_turn"', reason)
        yield event


_USAGE = "sglang.srt.entrypoints.openai.usage_processor:UsageProcessor"
_MESSAGES = "sglang.srt.entrypoints.anthropic.serving:AnthropicServing"
_MEDIA = ("image_tokens", "audio_tokens", "video_tokens")
HOOKS = (
    Hook(
        f"{_USAGE}.calculate_response_usage",
        AROUND,
        _with_cached,
        ("responses", "n_choices", "enable_cache_report", *_MEDIA),
    ),
    Hook(
        f"{_USAGE}.calculate_streaming_usage",
        AROUND,
        _with_cached,
        (
            *("prompt_tokens", "reasoning_tokens", "completion_tokens", "cached_tokens", "n_choices"),
            *("enable_cache_report", *_MEDIA),
        ),
    ),
    Hook(
        f"{_USAGE}.calculate_token_usage",
        AFTER,
        _with_reasoning,
        ("prompt_tokens", "completion_tokens", "reasoning_tokens", "cached_tokens", *_MEDIA),
    ),
    Hook(
        "sglang.srt.entrypoints.openai.protocol:ResponsesRequest.to_sampling_params",
        AFTER,
        _whole_budget,
        ("default_max_tokens", "default_params", "stop", "tool_call_constraint"),
    ),
    Hook("sglang.srt.entrypoints.anthropic.serving:_cached_prompt_tokens", AFTER, _uncached, ("usage",)),
    Hook(f"{_MESSAGES}._convert_response", AFTER, _with_stop_sequence, ("response",)),
    Hook(
        f"{_MESSAGES}._generate_anthropic_stream",
        AROUND,
        _stream_with_stop_sequence,
        ("adapted_request", "processed_request", "anthropic_request", "raw_request"),
    ),
)
