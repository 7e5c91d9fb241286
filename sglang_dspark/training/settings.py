"""Everything a training run depends on, in one frozen object that is written beside the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

DTYPES = ("bfloat16", "float32")


class TrainSettings(BaseModel):
    """Settings of one ``train-draft`` run. Unknown names are refused; sizes are checked when built.

    Machine: ``workers`` processes of ``threads`` threads each (a GPU wants one).
    Data: ``prompts`` is a JSONL path or None for the package sources; ``answers`` prompts are answered with at most
    ``max_new`` tokens, or ``answered`` is a folder that `sglang-dspark collect` has filled, and nothing is generated but
    what is held out; ``text_tokens`` tokens of packaged text are captured without generation.
    Draft: ``gamma`` drafted tokens, ``layers``, ``feature_layers`` (outputs of target layers), ``head`` of rank
    ``rank`` (0: none), ``confidence`` inputs, ``draft_vocab`` proposable tokens (0: all), ``shape`` of the block;
    ``start_from`` a finished draft's folder whose weights are taken where they fit.
    Training: stops at ``steps`` or ``minutes``, whichever comes first. Loss: ce·CE + tv·TV + BCE of the confidence.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    seed: int = 0
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    workers: int = Field(1, ge=1)
    threads: int = Field(1, ge=1)

    prompts: str | None = None
    answers: int = Field(4000, ge=1)
    answered: str | None = None
    max_prompt: int = Field(512, ge=8)
    max_new: int = Field(256, ge=8)
    temperature: float = Field(1.0, ge=0, le=2)
    greedy_share: float = Field(0.15, ge=0, le=1)
    text_tokens: int = Field(0, ge=0)
    generation_batch: int = Field(64, ge=1)
    generation_minutes: float = Field(30.0, gt=0)
    shard_tokens: int = Field(24_000, ge=100)

    gamma: int = Field(5, ge=1, le=32)
    layers: int = Field(1, ge=1)
    feature_layers: tuple[int, ...] = ()
    head: Literal["vanilla", "gated", "rnn"] = "vanilla"
    rank: int = Field(128, ge=0)
    confidence: Literal["markov", "hidden", "both", "none"] = "both"
    draft_vocab: int = Field(8192, ge=0)
    shape: Literal["target", "qwen3"] = "target"
    init_from_target: bool = True
    start_from: str | None = None
    normalize_features: bool = True
    mask_token: int | None = None

    steps: int = Field(1_000_000, ge=1)
    minutes: float = Field(20.0, gt=0)
    sequences_per_step: int = Field(4, ge=1)
    anchors: int = Field(24, ge=1)
    learning_rate: float = Field(3e-3, gt=0)
    warmup: float = Field(0.04, ge=0, lt=1)
    clip: float = Field(1.0, gt=0)
    ce: float = Field(0.1, ge=0)
    tv: float = Field(0.9, ge=0)
    decay: float = Field(4.0, gt=0)
    confidence_reaches_backbone: bool = False
    checkpoint_minutes: float = Field(4.0, gt=0)

    held_prompts: int = Field(120, ge=2)
    evaluation_prompts: int = Field(40, ge=2)
    evaluation_new: int = Field(96, ge=2)
    evaluation_batch: int = Field(16, ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> TrainSettings:
        if self.rank == 0 and self.confidence in ("markov", "both"):
            raise ValueError("rank 0 has no Markov embedding for the confidence to read: use confidence hidden or none")
        if self.answered is not None and self.text_tokens:
            raise ValueError("text_tokens go into shards, and answered reads none: set one of the two")
        if self.ce == 0 and self.tv == 0:
            raise ValueError("the loss needs ce or tv above 0")
        return self

    def save(self, path: Path) -> None:
        path.write_text(self.model_dump_json(indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> TrainSettings:
        return cls(**json.loads(path.read_text()))
