"""What a measured cost is valid for, beside the checkpoints: the GPU, its attention, and the graphs that it replays."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

CPUINFO = Path("/proc/cpuinfo")


def describe_device(device: str) -> str:
    """One line for a fingerprint, of the process's published settings: equal iff a step costs the same.

    A CPU is its name and its threads. A GPU is its name, the attention backends of target and draft, and the numbers
    of requests at which graphs are captured (the engine makes its token tiers from them).
    """
    if torch.device(device).type == "cpu":
        return f"{cpu_name()}, {torch.get_num_threads()} threads"
    from sglang.srt.runtime_context import attention_backends, get_exec, get_spec

    decode = get_exec().graph.cuda_graph_config.decode
    target, draft = attention_backends()[1], get_spec().speculative_draft_attention_backend
    sizes = f"graphs for {' '.join(map(str, decode.bs))} requests"
    graphs = "no graphs" if decode.backend == "disabled" else sizes
    return f"{torch.cuda.get_device_name(device)}, {target} and {draft or target}, {graphs}"


def cpu_name() -> str:
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
