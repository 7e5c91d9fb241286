"""Answers from a running server, as token ids (`answer_files`): the fastest way to speak, since it is the product itself.

Any server of the target will do, plain or speculative: what it says follows the target's law. Features are not kept; a
prefill of the finished answer gives them back for a fifth of the price (docs/training.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import numpy as np

from sglang_dspark.errors import UserError
from sglang_dspark.prompts.prompts import KINDS, Prompt, encode
from sglang_dspark.training.answer_files import Answer, answered_prompts, write_answers

SHORTEST = 3  # answered tokens: a shorter one holds no block to learn from


class CollectError(UserError):
    """The server did not answer as asked; the message holds its reason."""


class Collector:
    """Lets a server answer prompts and writes a file of every `file_tokens` answered tokens.

    Args:
        url: of the server, without a trailing slash. tokenizer: the target's. target: its name, kept in the files.
        folder: of the files; prompts that they hold are not asked again.
        at_once: requests under way. max_prompt: longer prompts are left out. max_new: answer tokens at most.
        file_tokens: answered tokens of a file.
    """

    def __init__(
        self,
        url: str,
        tokenizer,
        target: str,
        folder: Path,
        *,
        at_once: int = 64,
        max_prompt: int = 512,
        max_new: int = 256,
        file_tokens: int = 200_000,
    ) -> None:
        self.url, self.tokenizer, self.target, self.folder = url, tokenizer, target, folder
        self.at_once, self.max_prompt, self.max_new, self.file_tokens = at_once, max_prompt, max_new, file_tokens
        folder.mkdir(parents=True, exist_ok=True)
        self.done = answered_prompts(folder, target)
        self.answered = sum(self.done.values())
        self.pending: list[Answer] = []

    def run(
        self, prompts: Sequence[Prompt], tokens: int | None = None, report: Callable[[int], None] = lambda done: None
    ) -> int:
        """Answer what is not answered yet, until `tokens` answered tokens are there; returns how many are.

        Args: report: called with the number so far after every answer.

        Raises:
            CollectError: the server refused a request or went away; what it had answered is on disk.
        """
        try:
            asyncio.run(self._run(prompts, tokens, report))
        except httpx.HTTPError as error:
            raise CollectError(f"{self.url} went away: {error!r}; run the same command again to continue") from None
        finally:
            self._flush()
        return self.answered

    async def _run(self, prompts: Sequence[Prompt], tokens: int | None, report: Callable[[int], None]) -> None:
        waiting = ((index, prompt) for index, prompt in enumerate(prompts) if index not in self.done)
        limits = httpx.Limits(max_connections=self.at_once)
        async with httpx.AsyncClient(timeout=None, limits=limits) as client:
            await asyncio.gather(*(self._ask_in_turn(client, waiting, tokens, report) for _ in range(self.at_once)))

    async def _ask_in_turn(self, client: httpx.AsyncClient, waiting, tokens: int | None, report) -> None:
        for index, prompt in waiting:
            if tokens is not None and self.answered >= tokens:
                return
            ids = encode(prompt, self.tokenizer)
            if 0 < len(ids) <= self.max_prompt:
                spoken, kind = await self._ask(client, ids, prompt), KINDS.index(prompt.kind)
                self._keep(Answer(spoken, len(ids), kind, prompt.temperature, index))
                report(self.answered)

    async def _ask(self, client: httpx.AsyncClient, ids: tuple[int, ...], prompt: Prompt) -> np.ndarray:
        parameters = {"temperature": prompt.temperature, "max_new_tokens": self.max_new}
        answer = await client.post(f"{self.url}/generate", json={"input_ids": list(ids), "sampling_params": parameters})
        if answer.status_code != 200:
            raise CollectError(f"{self.url} answered {answer.status_code}: {answer.text[:300]}")
        return np.array([*ids, *answer.json()["output_ids"]], np.int64)

    def _keep(self, answer: Answer) -> None:
        if answer.answered < SHORTEST:
            return
        self.pending.append(answer)
        self.answered += answer.answered
        if sum(kept.answered for kept in self.pending) >= self.file_tokens:
            self._flush()

    def _flush(self) -> None:
        if self.pending:
            answers, self.pending = self.pending, []
            taken = {path.stem for path in self.folder.glob("*.npz")}
            number = next(n for n in range(len(taken) + 1) if f"answers-{n:04d}" not in taken)
            write_answers(self.folder / f"answers-{number:04d}.npz", answers, self.target)
