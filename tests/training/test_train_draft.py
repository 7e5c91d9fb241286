"""The whole pipeline on a randomly initialised Qwen3 of four small layers: prompts to model card, in one command.

Catches a stage that does not hand on what the next one needs, a result folder that does not load, a second run that
starts from nothing. Strength: it says nothing about how good a draft gets (a random target cannot be learnt in a
minute), but training on its own answers must raise the expected accepted length above the untrained draft's.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM
from typer.testing import CliRunner

from sglang_dspark.training.answer_files import Answer, write_answers
from sglang_dspark.training.model import load_draft
from tests.engine.tiny import tiny_target

PROMPTS = [f"{a} {b} {c}" for a in ("tell", "write", "solve") for b in ("me", "a", "the") for c in "abcdefg"]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), "qwen3", hidden=32, tie_embeddings=True, words=64)


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [
        {"class": "chat" if i % 2 else "code", "messages": [{"role": "user", "content": p}]}
        for i, p in enumerate(PROMPTS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(*arguments: object):
    import typer

    from sglang_dspark.commands.train_draft import train_draft

    app = typer.Typer()
    app.command()(train_draft)
    return CliRunner().invoke(app, [str(a) for a in arguments])


SETTINGS = (
    "answers=120 max_new=24 max_prompt=16 generation_batch=32 shard_tokens=500 gamma=3 layers=1 rank=8 draft_vocab=48 "
    "steps=60 minutes=1.0 sequences_per_step=8 anchors=8 learning_rate=0.01 held_prompts=10 evaluation_prompts=6 "
    "evaluation_new=24 workers=2 dtype=float32 device=cpu feature_layers=[0,2]"
)


def test_one_command_makes_a_draft_that_loads_and_a_second_run_finds_it_done(tmp_path, target, prompts_file):
    out = tmp_path / "draft"
    pairs = [x for pair in SETTINGS.split() for x in ("--set", pair)]
    arguments = ("--out", out, "--target", target, "--prompts", prompts_file, *pairs)
    result = command(*arguments)
    assert result.exit_code == 0, result.output
    state = torch.load(tmp_path / "draft.work" / "checkpoint.pt", weights_only=True)
    assert state["step"] >= 60
    for name in (
        "config.json",
        "model.safetensors",
        "sts.json",
        "README.md",
        "settings.json",
        "evaluation.json",
        "tokenizer.json",
    ):
        assert (out / name).exists(), name
    weights = target_weights(target)
    draft = load_draft(out, weights, weights)
    assert draft.config.architecture == "Qwen3DSparkModel" and draft.config.enable_hidden_confidence_head
    log = json.loads((out / "training_log.json").read_text())
    assert log[-1]["held_length"] > 1.05
    sts = json.loads((out / "sts.json").read_text())
    assert len(sts["temperatures"]) == len(sts["hidden_temperatures"]) == 3
    card = (out / "README.md").read_text()
    assert "| chat |" in card and "AUC" in card
    stamp = (tmp_path / "draft.work" / "checkpoint.pt").stat().st_mtime
    assert command(*arguments).exit_code == 0
    assert (tmp_path / "draft.work" / "checkpoint.pt").stat().st_mtime == stamp
    other = command(*arguments, "--set", "rank=4")
    assert other.exit_code == 1 and "rank" in other.output


def test_answers_of_a_server_train_a_draft_without_any_being_generated(tmp_path, target, prompts_file):
    random = np.random.default_rng(0)
    folder = tmp_path / "answers"
    folder.mkdir()
    for number in range(4):
        rows = [Answer(random.integers(6, 60, 24), 4, 0, 1.0, 100 * number + i) for i in range(30)]
        write_answers(folder / f"answers-{number:04d}.npz", rows, target.name)
    pairs = [x for pair in (*SETTINGS.split(), "steps=20", f"answered={folder}") for x in ("--set", pair)]
    arguments = ("--out", tmp_path / "draft", "--target", target, "--prompts", prompts_file, *pairs)
    result = command(*arguments)
    assert result.exit_code == 0, result.output
    work = tmp_path / "draft.work"
    assert not (work / "shards").exists()
    for worker in range(2):
        assert json.loads((work / f"stream-{worker}-of-2.json").read_text())["taken"]
    absent = command(*arguments, "--set", "answered=nowhere", "--work", tmp_path / "other")
    assert absent.exit_code == 1 and "holds no answers" in absent.output and not (tmp_path / "other").exists()
    refused = command(*arguments, "--set", "text_tokens=1000")
    assert refused.exit_code == 2 and "text_tokens" in refused.output


def target_weights(folder: Path) -> torch.Tensor:
    return Qwen3ForCausalLM.from_pretrained(folder).get_input_embeddings().weight


def test_a_dry_run_prints_sizes_and_writes_nothing(tmp_path, target):
    result = command("--out", tmp_path / "x" / "draft", "--target", target, "--dry-run", "--device", "cpu")
    assert result.exit_code == 0 and "parameters" in result.output
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    "arguments, word",
    [
        (("--set", "gama=3"), "gama"),
        (("--gamma", 0), "gamma"),
        (("--rank", 0), "rank 0"),
        (("--set", "answers=900000000", "--dry-run"), "free"),
        (("--feature-layers", "3", "--dry-run"), "feature layer 3"),
        (("--target", "/nowhere"), "config.json"),
    ],
)
def test_what_cannot_work_is_refused_at_once_in_one_line(tmp_path, target, arguments, word):
    result = command("--target", target, "--out", tmp_path / "draft", "--device", "cpu", *arguments)
    assert result.exit_code in (1, 2) and word in result.output
    assert "Traceback" not in result.output
