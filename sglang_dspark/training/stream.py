"""Answers as token ids, streamed to the trainer: a prefill gives their features when they are needed, and none is kept.

Files may still be written while they are read: a new one is taken before any other is taken twice. What a worker has taken
is a small dictionary, so a run continues at the sequence where it stopped.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from sglang_dspark.training.answer_files import Answer, AnswerFileError, read_answers
from sglang_dspark.training.shards import Example
from sglang_dspark.training.target import Target

TOGETHER = 8  # sequences of one prefill
WINDOW = 64  # sequences among which those of near lengths are put together


class AnswerStream:
    """Sequences of a folder of answers for ever, with their features.

    Args:
        folder: of `answers-*.npz` files; worker i takes every `workers`-th of them.
        target: computes features and totals. seed: of the order.
        state: of an earlier run (`state`), to continue there.

    Raises:
        AnswerFileError: the folder holds no file, or one of another target.
    """

    def __init__(
        self, folder: Path, target: Target, worker: int = 0, workers: int = 1, seed: int = 0, state: dict | None = None
    ) -> None:
        self.folder, self.target, self.worker, self.workers, self.seed = folder, target, worker, workers, seed
        self.visit, self.taken, self.offset = 0, [], 0
        if state is not None:
            self.visit, self.taken, self.offset = state["visit"], list(state["taken"]), state["offset"]

    @property
    def state(self) -> dict:
        """What was taken: the pass over the data, the files of this pass (the last one up to `offset`)."""
        return {"visit": self.visit, "taken": list(self.taken), "offset": self.offset}

    def __iter__(self) -> Iterator[Example]:
        check_answers(self.folder, self.target.path.name)
        while True:
            answers = self._file()
            while self.offset < len(answers):
                group = answers[self.offset : self.offset + TOGETHER]
                for example in prefilled(self.target, group, self.visit):
                    self.offset += 1
                    yield example

    def _files(self) -> list[str]:
        names = sorted(path.name for path in self.folder.glob("answers-*.npz"))
        return [name for i, name in enumerate(names) if i % self.workers == self.worker] or names

    def _file(self) -> list[Answer]:
        """The answers of the file to read from, in the order of this pass: a continued one, a fresh one, or the next pass."""
        if not self.taken or self.offset >= len(self._shuffled(self.taken[-1])):
            fresh = [name for name in self._files() if name not in self.taken]
            if not fresh:
                self.visit, self.taken, fresh = self.visit + 1, [], self._files()
            self.taken.append(random.Random(f"{self.seed} {self.visit} {len(self.taken)}").choice(fresh))
            self.offset = 0
        return self._shuffled(self.taken[-1])

    def _shuffled(self, name: str) -> list[Answer]:
        answers = [a for a in read_answers(self.folder / name, self.target.path.name) if a.answered >= 3]
        random.Random(f"{self.seed} {self.visit} {name}").shuffle(answers)
        windows = [answers[i : i + WINDOW] for i in range(0, len(answers), WINDOW)]
        return [answer for window in windows for answer in sorted(window, key=lambda a: len(a.tokens))]


def check_answers(folder: Path, target: str) -> None:
    """Raise AnswerFileError where the folder holds no file of answers, or its first one is another target's."""
    first = min(folder.glob("answers-*.npz"), default=None)
    if first is None:
        raise AnswerFileError(f"{folder} holds no answers: make some with `sglang-dspark collect`")
    read_answers(first, target)


def answered_tokens(folder: Path, target: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(prompts' ids, answers' ids) of every file, int64."""
    for path in sorted(folder.glob("answers-*.npz")):
        answers = read_answers(path, target)
        prompts = np.concatenate([a.tokens[: a.prompt_length] for a in answers])
        yield (
            torch.from_numpy(prompts),
            torch.from_numpy(np.concatenate([a.tokens[a.prompt_length :] for a in answers])),
        )


def prefilled(target: Target, answers: list[Answer], visit: int = 0) -> list[Example]:
    """Answers with the features that the target computes for them, in one padded forward.

    Args: visit: how often these answers were taken before (`Example.visit`).
    """
    ids = torch.zeros(len(answers), max(len(a.tokens) for a in answers), dtype=torch.int64)
    for row, answer in enumerate(answers):
        ids[row, : len(answer.tokens)] = torch.from_numpy(np.ascontiguousarray(answer.tokens))
    features, final = target.forward(ids.to(target.device))
    return [_example(target, a, ids[row], features[row], final[row], visit) for row, a in enumerate(answers)]


def _example(
    target: Target, answer: Answer, ids: torch.Tensor, features: torch.Tensor, final: torch.Tensor, visit: int
) -> Example:
    n, first = len(answer.tokens), answer.prompt_length - 1
    totals = torch.zeros(n)
    totals[first:] = target.logits(final[first:n]).logsumexp(-1).cpu()
    parts = features[:n].cpu().clone(), final[:n].cpu().clone()  # clones leave inference mode
    for part in parts:
        part[-1] = 0  # the last token is never fed while it is spoken: as in shards
    return Example(ids[:n].int(), answer.prompt_length, *parts, totals, answer.kind, answer.index, visit)
