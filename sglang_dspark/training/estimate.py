"""What a run will take, before it starts: sizes from shapes, times from rates measured on 2 EPYC cores (stated as
such).
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from sglang_dspark.training.settings import TrainSettings

# Multiply-adds a second and thread that were reached here (bf16 CPU with AVX512-bf16; fp32 and a GPU by their ratio).
RATE = {("cpu", "bfloat16"): 1.2e11, ("cpu", "float32"): 4e10, ("cuda", "bfloat16"): 6e13, ("cuda", "float32"): 1.5e13}


@dataclass(frozen=True)
class Estimate:
    """Bytes and seconds. ``draft_bytes`` is the finished file; ``memory_bytes`` of all processes together."""

    draft_parameters: int
    draft_bytes: int
    feature_bytes: int
    memory_bytes: int
    answer_seconds: float
    train_seconds: float
    evaluation_seconds: float

    def lines(self) -> list[str]:
        """The estimate as printed by ``--dry-run``."""
        gib = 1 << 30
        return [
            f"draft: {self.draft_parameters / 1e6:.1f} M parameters, {self.draft_bytes / 1e6:.1f} MB",
            f"features on disk: at most {self.feature_bytes / gib:.2f} GiB",
            f"memory: about {self.memory_bytes / gib:.1f} GiB",
            (
                f"answers: about {self.answer_seconds / 60:.0f} min, training: at most "
                f"{self.train_seconds / 60:.0f} min, calibration and evaluation: "
                f"about {self.evaluation_seconds / 60:.0f} min (idle machine)"
            ),
        ]


def estimate(settings: TrainSettings, config, feature_layers: int) -> Estimate:
    """From the settings and the target's transformers config."""
    s, d, v = settings, config.hidden_size, config.vocab_size
    head_dim = getattr(config, "head_dim", None) or d // config.num_attention_heads
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    layer = d * head_dim * (2 * heads + 2 * kv) + 3 * d * config.intermediate_size
    target = config.num_hidden_layers * layer + v * d
    support = min(s.draft_vocab or v, v)
    parameters = s.layers * layer + feature_layers * d * d + s.rank * (v + support)
    spoken = s.answers if s.answered is None else s.held_prompts
    tokens = spoken * (s.max_new + 120) + s.text_tokens
    feature_bytes = tokens * (feature_layers + 1) * d * 2
    slots = s.generation_batch * (s.max_prompt + s.max_new)
    cache = slots * (2 * config.num_hidden_layers * kv * head_dim + (feature_layers + 1) * d) * 2
    wide = 2 if s.dtype == "bfloat16" else 4
    each = (400 << 20) + target * wide + max(cache, 20 * parameters + 6 * s.shard_tokens * (feature_layers + 1) * d * 2)
    rate = RATE[s.device, s.dtype] * (s.threads if s.device == "cpu" else 1)
    answers = min(60 * s.generation_minutes, spoken * s.max_new * target / (rate * 0.6) / s.workers)
    evaluation = 3 * s.evaluation_prompts * s.evaluation_new * 5 * target / (rate * 0.3)
    texts = s.text_tokens * target / rate
    return Estimate(
        parameters, 2 * parameters, feature_bytes, s.workers * each, answers + texts, 60 * s.minutes, evaluation
    )


def check_resources(needed: Estimate, work: Path) -> None:
    """Raise ValueError where the disk or the memory is too small, with both figures."""
    free = shutil.disk_usage(work).free
    if needed.feature_bytes + 10 * needed.draft_bytes > free:
        raise ValueError(
            f"{work} has {free / 1e9:.1f} GB free; this run may write {needed.feature_bytes / 1e9:.1f} GB of features: "
            "lower --answers, --max-new or --text-tokens, or give another --work folder"
        )
    memory = psutil.virtual_memory().available
    if needed.memory_bytes > memory:
        raise ValueError(
            f"this run needs about {needed.memory_bytes / 1e9:.1f} GB of memory, {memory / 1e9:.1f} GB are available: "
            "lower --workers, --generation-batch or --shard-tokens"
        )
