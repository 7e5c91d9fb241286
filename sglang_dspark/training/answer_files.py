"""Answers as token ids on disk: small enough to keep for good, and independent of which features a draft will read.

A file is numpy's compressed archive of `tokens` [N] (uint16 where every id fits, else uint32), `lengths` and
`prompt_lengths` [s] int32, `kind` [s] uint8 (index into KINDS), `temperature` [s] float32 and `index` [s] int64 (of the
prompt in its list), with `target` [], the model's name. Sequences follow each other; a prompt's tokens come first.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sglang_dspark.errors import UserError
from sglang_dspark.prompts.prompts import KINDS

COLUMNS = ("tokens", "lengths", "prompt_lengths", "kind", "temperature", "index", "target")


class AnswerFileError(UserError):
    """A file of answers that cannot be read, or was made with another target; the message names it."""


@dataclass(frozen=True)
class Answer:
    """One answered prompt.

    Args:
        tokens: int64 [n] ids, the prompt's `prompt_length` first, then the answer's with its stop token.
        kind: class of the prompt, an index into KINDS. temperature: of the answer. index: of the prompt in its list.
    """

    tokens: np.ndarray
    prompt_length: int
    kind: int
    temperature: float
    index: int

    @property
    def answered(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.prompt_length


def write_answers(path: Path, answers: Sequence[Answer], target: str) -> None:
    """Write one file, aside and renamed, so that an interrupted run leaves no half of one."""
    tokens = np.concatenate([answer.tokens for answer in answers])
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as out:
        np.savez_compressed(
            out,
            tokens=tokens.astype(np.uint16 if tokens.max() < 1 << 16 else np.uint32),
            lengths=np.array([len(answer.tokens) for answer in answers], np.int32),
            prompt_lengths=np.array([answer.prompt_length for answer in answers], np.int32),
            kind=np.array([answer.kind for answer in answers], np.uint8),
            temperature=np.array([answer.temperature for answer in answers], np.float32),
            index=np.array([answer.index for answer in answers], np.int64),
            target=np.array(target),
        )
    os.replace(partial, path)


def read_answers(path: Path, target: str | None = None) -> list[Answer]:
    """The answers of one file.

    Raises:
        AnswerFileError: it is no such file, or another model than `target` spoke them.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            columns = {name: archive[name] for name in COLUMNS}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise AnswerFileError(f"{path} is no file of answers: {error}") from None
    lengths, prompts = columns["lengths"].astype(np.int64), columns["prompt_lengths"].astype(np.int64)
    if lengths.sum() != len(columns["tokens"]) or (prompts < 1).any() or (prompts >= lengths).any():
        raise AnswerFileError(f"{path} is no file of answers: its lengths do not fit its tokens")
    if (columns["kind"] >= len(KINDS)).any():
        raise AnswerFileError(f"{path} is no file of answers: a class of prompts is unknown")
    if target is not None and str(columns["target"]) != target:
        raise AnswerFileError(f"{path} holds answers of {columns['target']}, not of {target}")
    parts = np.split(columns["tokens"].astype(np.int64), np.cumsum(lengths)[:-1])
    rest = (columns[name].tolist() for name in ("prompt_lengths", "kind", "temperature", "index"))
    return [Answer(*row) for row in zip(parts, *rest, strict=True)]


def answered_prompts(folder: Path, target: str | None = None) -> dict[int, int]:
    """Prompt index -> answered tokens, over the folder's files."""
    files = sorted(folder.glob("*.npz"))
    return {answer.index: answer.answered for path in files for answer in read_answers(path, target)}
