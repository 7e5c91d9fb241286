"""One request under plain decoding and under a speculating server, and what must be equal in the two answers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx

# What may differ: names of the answer, clocks, how the prefix cache was filled, and the numbers of speculation itself.
VOLATILE = {
    "id",
    "rid",
    "created",
    "created_at",
    "completed_at",
    "cached_tokens",
    "prompt_tokens_details",
    "sglext",
    "input_tokens_details",
    "cache_read_input_tokens",
    "cached_tokens_details",
    "dp_rank",
    "item_id",
    "total_duration",
    "load_duration",
    "prompt_eval_duration",
    "eval_duration",
}
VOLATILE_PREFIXES = (
    "spec_",
    "e2e_",
    "request_",
    "queue_",
    "prefill_",
    "decode_",
    "num_retractions",
    "response_sent",
    "inference_",
    "forward_",
    "api_server",
)
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    """A named request: its body, and the route it goes to."""

    name: str
    body: dict
    path: str = "/generate"
    seeded: bool = field(default=False)

    @property
    def streamed(self) -> bool:
        return bool(self.body.get("stream"))


def ask(url: str, case: Case) -> object:
    """The answer with its status: a JSON body, or what a stream adds up to."""
    if not case.streamed:
        answer = httpx.post(url + case.path, json=case.body, timeout=300)
        body = answer.json()
        usage = body.get("usage") if case.path == "/v1/messages" and isinstance(body, dict) else None
        if usage:  # this API counts what was read from the prefix cache apart from the input
            usage["input_tokens"] += usage.get("cache_read_input_tokens") or 0
        return [answer.status_code, body]
    with httpx.stream("POST", url + case.path, json=case.body, timeout=300) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ") and line != "data: [DONE]"]
    chunks = [json.loads(line) for line in lines]
    return [answer.status_code, chunks[-1] if case.path == "/generate" else joined(chunks)]


def joined(chunks: list[dict]) -> dict:
    """What OpenAI chunks add up to: per choice its text, tool calls, log-probabilities and end; and the usage."""
    total: dict = {"choices": {}}
    for chunk in chunks:
        if chunk.get("usage"):
            total["usage"] = chunk["usage"]
        for choice in chunk.get("choices") or []:
            kept = total["choices"].setdefault(str(choice["index"]), {})
            delta = choice.get("delta") or {"content": choice.get("text")}
            for key in ("content", "reasoning_content"):
                kept[key] = kept.get(key, "") + (delta.get(key) or "")
            for call in delta.get("tool_calls") or []:
                function = call.get("function") or {}
                kept.setdefault("tools", {}).setdefault(str(call.get("index")), []).append(
                    [function.get("name"), function.get("arguments")]
                )
            if choice.get("finish_reason"):
                kept["finish_reason"] = choice["finish_reason"]
                kept["matched_stop"] = choice.get("matched_stop")
            logprobs = choice.get("logprobs") or {}
            for key, value in logprobs.items():
                if isinstance(value, list):
                    kept.setdefault("logprobs", {}).setdefault(key, []).extend(value)
    for choice in total["choices"].values():
        for index, parts in choice.get("tools", {}).items():
            choice["tools"][index] = [next((n for n, _ in parts if n), None), "".join(a or "" for _, a in parts)]
    return total


def answers(url: str, cases: Iterable[Case], concurrency: int = 12) -> dict[str, object]:
    """Answers by name, asked at concurrency."""
    with ThreadPoolExecutor(concurrency) as pool:
        named = [(case.name, pool.submit(ask, url, case)) for case in cases]
        return {name: future.result() for name, future in named}


def differences(ours: object, theirs: object, where: str = "") -> list[str]:
    """Where two answers differ, field by field; log-probabilities within `TOLERANCE`. Lists of equal tokens only."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [
            line
            for key in sorted(ours.keys() | theirs.keys())
            if not _volatile(key)
            for line in differences(ours.get(key), theirs.get(key), f"{where}.{key}")
        ]
    if _forbidden(ours) and _forbidden(theirs):
        return []
    if isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            return [f"{where}: {len(ours)} != {len(theirs)} items: {ours!r:.200} != {theirs!r:.200}"]
        return [line for i, (a, b) in enumerate(zip(ours, theirs)) for line in differences(a, b, f"{where}[{i}]")]
    if isinstance(ours, float) and isinstance(theirs, float):
        close = math.isclose(ours, theirs, abs_tol=TOLERANCE) or (math.isinf(ours) and ours == theirs)
        return [] if close else [f"{where}: {ours} != {theirs}"]
    return [] if ours == theirs else [f"{where}: {ours!r:.300} != {theirs!r:.300}"]


def _forbidden(entry: object) -> bool:
    """A [log-probability, id, text] of a masked token: which of the many masked ones is named is chance."""
    return isinstance(entry, list) and len(entry) == 3 and isinstance(entry[0], float) and entry[0] < -1e30


def _volatile(key: str) -> bool:
    return key in VOLATILE or key.startswith(VOLATILE_PREFIXES)
