"""What a process needs before SGLang runs in it on a plain CPU: no dynamo, our attention backend, its cores."""

from __future__ import annotations

import os
import sys

from sglang_dspark.cpu import ATTENTION_BACKEND


def prepare_process() -> None:
    """Run when the platform object is made, in every SGLang process and before its arguments are parsed."""
    disable_compilation()
    from sglang.srt.arg_groups import choices

    for names in (choices.ATTENTION_BACKEND_CHOICES, choices.DRAFT_ATTENTION_BACKEND_CHOICES):
        if ATTENTION_BACKEND not in names:
            names.append(ATTENTION_BACKEND)


def prepare_worker() -> None:
    """Run when a process that holds a model starts (SGLang's `init_backend`)."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(ATTENTION_BACKEND)(_make_backend)


def _make_backend(runner):
    from sglang_dspark.cpu.attention import CpuAttentionBackend

    return CpuAttentionBackend(runner)


def disable_compilation() -> None:
    """Make `torch.compile` return the function it was given: its CPU backend needs a C++ compiler at run time."""
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # read when torch._dynamo is imported, here and in child processes
    config = sys.modules.get("torch._dynamo.config")
    if config is not None:
        config.disable = True
