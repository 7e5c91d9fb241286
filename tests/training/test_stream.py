"""Answers streamed to the trainer: features as they were when spoken, every answer once before any twice, and no loss on
a restart.

Catches: padding that changes a feature, a worker that reads another's files, a file that arrived late and is never read,
a restart that takes answers again or leaves some out, anchors that repeat while others were never drawn.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_dspark.training.answer_files import Answer, AnswerFileError, write_answers
from sglang_dspark.training.data import make_batch
from sglang_dspark.training.generate import Generator, Request
from sglang_dspark.training.shards import Example
from sglang_dspark.training.stream import AnswerStream, prefilled
from sglang_dspark.training.target import Target
from tests.engine.tiny import tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    folder = tiny_target(tmp_path_factory.mktemp("targets") / "tiny", "qwen3", hidden=32, words=64)
    return Target(folder, (0, 2), dtype=torch.float32)


def fill(folder: Path, number: int, count: int = 20) -> None:
    """A file of `count` short answers whose index says which they are."""
    random = np.random.default_rng(number)
    answers = [
        Answer(random.integers(6, 60, random.integers(8, 30)), 3, 0, 1.0, 1000 * number + i) for i in range(count)
    ]
    write_answers(folder / f"answers-{number:04d}.npz", answers, "tiny")


def test_the_features_of_a_prefill_are_those_of_the_answer_when_it_was_spoken(target):
    spoken: list[Example] = []
    generator = Generator(target, 4, 20, 16, spoken.append)
    generator.run([Request((7, 8, 9, 10)[: 2 + i % 3], 1.0, 0, i) for i in range(6)])
    answers = [Answer(e.tokens.long().numpy(), e.prompt_length, e.kind, 1.0, e.index) for e in spoken]
    for before, after in zip(spoken, prefilled(target, answers), strict=True):
        n = before.tokens.shape[0]
        answered = slice(before.prompt_length - 1, n - 1)
        for part in ("tokens", "features", "final"):
            torch.testing.assert_close(getattr(after, part), getattr(before, part), atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(after.log_totals[answered], before.log_totals[answered], atol=1e-4, rtol=1e-4)


def test_two_workers_take_every_answer_once_before_any_twice_also_of_files_that_come_late(target, tmp_path):
    for number in range(4):
        fill(tmp_path, number)
    streams = [iter(AnswerStream(tmp_path, target, worker, 2)) for worker in range(2)]
    first = [[next(stream).index for _ in range(30)] for stream in streams]
    fill(tmp_path, 4), fill(tmp_path, 5)
    rest = [[next(stream).index for _ in range(30)] for stream in streams]
    taken = [index for part in (*first, *rest) for index in part]
    assert len(taken) == 120 and sorted(taken) == sorted(1000 * n + i for n in range(6) for i in range(20))
    again = [next(stream) for stream in streams]
    assert all(example.visit == 1 for example in again)


def test_a_restart_continues_at_the_next_answer(target, tmp_path):
    for number in range(3):
        fill(tmp_path, number)
    whole = [e.index for e in islice(AnswerStream(tmp_path, target), 130)]
    stream = AnswerStream(tmp_path, target)
    running = iter(stream)
    found = [next(running).index for _ in range(47)]
    continued = [e.index for e in islice(AnswerStream(tmp_path, target, state=stream.state), 83)]
    assert found + continued == whole
    assert whole[:60] != whole[60:120] and sorted(whole[:60]) == sorted(whole[60:120])


def test_an_empty_folder_or_one_of_another_target_is_one_line(target, tmp_path):
    with pytest.raises(AnswerFileError, match="holds no answers.*collect"):
        next(iter(AnswerStream(tmp_path, target)))
    write_answers(tmp_path / "answers-0000.npz", [Answer(np.arange(9), 2, 0, 1.0, 0)], "other")
    with pytest.raises(AnswerFileError, match="answers of other, not of tiny"):
        next(iter(AnswerStream(tmp_path, target)))


def test_anchors_of_later_visits_are_others_until_all_were_drawn(target):
    answer = Answer(np.arange(6, 30), 3, 0, 1.0, 7)  # anchors may stand at 3 to 22
    drawn: list[int] = []
    for visit in range(3):
        batch = make_batch(prefilled(target, [answer], visit), 8, 4, rng=None)
        positions = batch.positions[0].tolist()
        assert positions == sorted(set(positions)) and len(positions) == 8
        drawn += positions
    assert sorted(set(drawn[:16])) == sorted(drawn[:16]) and set(drawn) == set(range(3, 23))
