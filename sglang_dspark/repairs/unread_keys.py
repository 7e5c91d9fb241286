"""Requests that ask for something under a key that their route does not read: a 400 that names it, not an answer without it.

The engine ignores unknown keys at the top of a body. Where such a key is the name of a sampling parameter or ours, the
client meant something by it: `temperature` beside `sampling_params`, `max_new_tokens` on a chat route, `dspark` outside
`custom_params`. Other unknown keys are left alone, as the engine leaves them (docs/compatibility.md).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping

from sglang_dspark.contract.hooks import AFTER, AROUND, Hook
from sglang_dspark.settings.request import KEY

# What a key is called where a route does read it.
SYNONYMS = {
    "max_new_tokens": ("max_completion_tokens", "max_output_tokens", "max_tokens"),
    "sampling_seed": ("seed",),
    "seed": ("sampling_seed",),
    "min_new_tokens": ("min_tokens",),
}


@functools.cache
def meaningful() -> frozenset[str]:
    """The keys by which a client asks for sampling or speculation."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    return frozenset({KEY, "seed", *SamplingParams.__struct_fields__})


def reason_to_refuse(body: object, known: Collection[str], inner: str | None = None) -> str | None:
    """Why a body is refused, or None.

    Args:
        body: the parsed JSON. known: the keys that its route reads. inner: the key of the object in which the route reads
            sampling parameters, where that is not the body itself.
    """
    if not isinstance(body, Mapping):
        return None
    lost = sorted(key for key in meaningful() & body.keys() - set(known) if body[key] is not None)
    if not lost:
        return None
    key = lost[0]
    if key == KEY:
        place = f"{inner}.custom_params" if inner == "sampling_params" else "custom_params"
        fix = (
            f"put it into {place}"
            if inner == "sampling_params" or "custom_params" in known
            else "use another route for it"
        )
    elif (name := next((n for n in SYNONYMS.get(key, ()) if n in known), None)) is not None:
        fix = f"it is called {name} here"
    else:
        fix = f"put it into {inner}" if inner else "use /generate for it, or leave it out"
    return f"{key} is not read at the top of this route's body and would be without effect: {fix}"


@functools.cache
def _generate_keys() -> frozenset[str]:
    from sglang.srt.managers.io_struct import GenerateReqInput

    return frozenset(field.name for field in dataclasses.fields(GenerateReqInput))


def _of_generate(error: str | None, body: object) -> str | None:
    return error or reason_to_refuse(body, _generate_keys(), "sampling_params")


async def _of_route(original, serving, request, raw_request=None, *args, **kwargs):
    """Answers 400 in place of a route of the OpenAI, Anthropic or Ollama API."""
    if raw_request is not None and "json" in raw_request.headers.get("content-type", "json"):
        body = await raw_request.json()  # parsed already: the framework keeps it
        if (reason := reason_to_refuse(body, known_keys(type(request)), _inner(type(request)))) is not None:
            return refusal(reason)
    return await original(serving, request, raw_request, *args, **kwargs)


@functools.cache
def known_keys(model: type) -> frozenset[str]:
    """The keys that a route's request model reads; all of them where the route draws no tokens (embeddings, scores)."""
    fields = model.model_fields
    if "temperature" not in fields and "options" not in fields:
        return meaningful()
    return frozenset(fields) | {field.alias for field in fields.values() if field.alias}


def _inner(model: type) -> str | None:
    return "options" if "options" in model.model_fields else None


def refusal(reason: str):
    """A 400 in the form of the OpenAI API."""
    from fastapi.responses import JSONResponse

    return JSONResponse(
        status_code=400, content={"error": {"message": reason, "type": "invalid_request_error", "code": 400}}
    )


HOOKS = (
    Hook("sglang.srt.entrypoints.api_contract:generate_contract_error", AFTER, _of_generate, ("body",)),
    *(
        Hook(f"sglang.srt.entrypoints.{route}", AROUND, _of_route, ("request", "raw_request"))
        for route in (
            "openai.serving_base:OpenAIServingBase.handle_request",
            "openai.serving_responses:OpenAIServingResponses.create_responses",
            "anthropic.serving:AnthropicServing.handle_messages",
            "ollama.serving:OllamaServing.handle_chat",
            "ollama.serving:OllamaServing.handle_generate",
        )
    ),
)
