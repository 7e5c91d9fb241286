"""What a process needs before SGLang runs in it on a plain CPU: no dynamo, our attention backend, its cores."""

from __future__ import annotations

import os
import sys

from sglang_dspark.contract.hooks import register
from sglang_dspark.cpu import ATTENTION_BACKEND, defaults
from sglang_dspark.cpu.processes import forkserver


def prepare_process() -> None:
    """Run when the platform object is made, in every SGLang process and before its arguments are parsed."""
    disable_compilation()
    hide_gpu_libraries()
    from sglang.srt.arg_groups import choices

    forkserver.use_for_sglang()
    register(defaults.HOOKS)
    for names in (choices.ATTENTION_BACKEND_CHOICES, choices.DRAFT_ATTENTION_BACKEND_CHOICES):
        if ATTENTION_BACKEND not in names:
            names.append(ATTENTION_BACKEND)


def prepare_worker() -> None:
    """Run when a process that holds a model starts (SGLang's `init_backend`)."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from sglang_dspark.cpu.attention import layers
    from sglang_dspark.cpu.processes.cores import replace_bindings
    from sglang_dspark.cpu.processes.memory import keep_freed_memory

    keep_freed_memory()
    register_attention_backend(ATTENTION_BACKEND)(_make_backend)
    layers.register()
    replace_bindings()


def _make_backend(runner):
    from sglang_dspark.cpu.attention.backend import CpuAttentionBackend

    return CpuAttentionBackend(runner)


def disable_compilation() -> None:
    """Make `torch.compile` return the function it was given: its CPU backend needs a C++ compiler at run time.

    Replacing it also spares the import of inductor, about a second in each process.
    """
    import torch

    torch.compile = _uncompiled
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # for whoever calls dynamo directly, here and in child processes
    config = sys.modules.get("torch._dynamo.config")
    if config is not None:
        config.disable = True


def _uncompiled(model=None, **options):
    return model if model is not None else lambda function: function


def hide_gpu_libraries() -> None:
    """Make `import flashinfer` fail as where it is not installed: it compiles CUDA and costs two seconds to import."""
    if "flashinfer" not in sys.modules:
        sys.modules["flashinfer"] = None
