"""Prompts of several classes: from a JSONL file, from written templates, and from data that PyPI packages carry.

A prompt is a list of chat messages with a class, and says how warmly the target shall answer it. The held-out part is
drawn by a hash of the text, so the same prompt never trains and evaluates, whatever the list's order or length.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sglang_dspark.errors import first_fault

KINDS = ("chat", "code", "math", "tool", "prose", "text")  # classes of prompts; shards store the index


@dataclass(frozen=True)
class Prompt:
    """Chat messages (role and content), their class (one of KINDS), and the temperature of the target's answer."""

    kind: str
    messages: tuple[tuple[str, str], ...]
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"prompt class {self.kind!r} is unknown: use one of {', '.join(KINDS)}")
        if not self.messages or self.messages[-1][0] != "user":
            raise ValueError("a prompt must end with a user's message")
        if not 0 <= self.temperature <= 2:
            raise ValueError(f"temperature {self.temperature} is outside [0, 2]")

    @property
    def held_out(self) -> bool:
        """One prompt in twenty is kept for calibration and evaluation."""
        text = json.dumps(self.messages)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 20 == 0


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    role: str
    content: str


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")

    kind: str = Field(default="chat", alias="class")
    messages: list[_Message]
    temperature: float = 1.0

    def prompt(self) -> Prompt:
        return Prompt(self.kind, tuple((m.role, m.content) for m in self.messages), self.temperature)


def load_prompts(path: Path) -> list[Prompt]:
    """Read JSONL: {"class": "chat", "messages": [{"role": …, "content": …}], "temperature": 1.0} a line.

    Raises ValueError naming the line that is not like that.
    """
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompts.append(_Line.model_validate(json.loads(line)).prompt())
        except ValidationError as error:
            raise ValueError(f"{path}, line {number}: {first_fault(error)}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return prompts


def save_prompts(prompts: Iterable[Prompt], path: Path) -> None:
    """Write the JSONL that ``load_prompts`` reads."""
    with open(path, "w") as out:
        for prompt in prompts:
            row = asdict(prompt)
            messages = [{"role": role, "content": content} for role, content in row.pop("messages")]
            out.write(
                json.dumps({"class": row["kind"], "messages": messages, "temperature": row["temperature"]}) + "\n"
            )


def encode(prompt: Prompt, tokenizer) -> tuple[int, ...]:
    """Token ids of the prompt with the assistant's turn opened; without a chat template, the plain text."""
    messages = [{"role": role, "content": content} for role, content in prompt.messages]
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    else:
        text = "\n\n".join(content for _, content in prompt.messages) + "\n\n"
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)


def mix(
    sources: dict[str, Sequence[Prompt]],
    count: int,
    seed: int,
    greedy_share: float = 0.15,
    weights: dict[str, float] | None = None,
) -> list[Prompt]:
    """``count`` prompts in random order, a share of them answered greedily; the classes in equal parts, or by ``weights``.

    A class with too few prompts is repeated (its answers differ: they are sampled), but never greedily twice. A class
    that ``weights`` does not name counts once.
    """
    rng = random.Random(seed)
    chosen: list[Prompt] = []
    kinds = sorted(kind for kind, prompts in sources.items() if prompts)
    for kind, wanted in zip(kinds, _parts(count, [(weights or {}).get(kind, 1.0) for kind in kinds]), strict=True):
        pool = list(sources[kind])
        rng.shuffle(pool)
        for i in range(wanted):
            prompt = pool[i % len(pool)]
            greedy = i < len(pool) and rng.random() < greedy_share
            chosen.append(Prompt(prompt.kind, prompt.messages, 0.0 if greedy else prompt.temperature))
    rng.shuffle(chosen)
    return chosen


def _parts(count: int, weights: list[float]) -> list[int]:
    """`count` in whole parts in proportion to the weights; what is left over goes to the first ones."""
    parts = [int(count * weight / sum(weights)) for weight in weights]
    return [part + (i < count - sum(parts)) for i, part in enumerate(parts)]
