"""Which implementation runs: Triton on a GPU, torch (or numba) elsewhere. The one place that imports triton.

A machine without a working triton must still serve, so every other module takes `triton`, `tl` and `jit` from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
    jit = triton.jit
except ImportError:  # CPU-only builds of torch come without triton
    triton, HAS_TRITON = None, False

    class tl:
        constexpr = object

    def jit(function):
        """Stand-in for `triton.jit`: the kernel stays importable and is never launched."""
        return function


HAS_NUMBA = find_spec("numba") is not None  # imported where it is used: it takes half a second

_PREFER_TORCH = False


@contextmanager
def prefer_torch() -> Iterator[None]:
    """Within this context GPU tensors take the torch path too: the eager baseline of benchmarks. Source: none."""
    global _PREFER_TORCH
    before, _PREFER_TORCH = _PREFER_TORCH, True
    try:
        yield
    finally:
        _PREFER_TORCH = before


def use_triton(tensor: torch.Tensor) -> bool:
    """True if work on this tensor belongs to the Triton path."""
    return HAS_TRITON and tensor.is_cuda and not _PREFER_TORCH
