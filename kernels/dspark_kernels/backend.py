"""Which implementation runs: Triton on a GPU, torch elsewhere. The one place that imports triton.

A machine without a working triton must still serve, so every other module takes `triton`, `tl` and `jit` from here.
"""

from __future__ import annotations

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


_TRITON_ON_CPU = False


def interpret_on_cpu(enabled: bool) -> None:
    """Send CPU tensors to the Triton kernels too (parity tests under the Triton interpreter).

    The interpreter itself is chosen by Triton when it is imported (`TRITON_INTERPRET=1`); this only moves the
    dispatcher. Raises RuntimeError where triton is absent. Source: none.
    """
    global _TRITON_ON_CPU
    if enabled and not HAS_TRITON:
        raise RuntimeError("triton is not installed: its interpreter cannot run")
    _TRITON_ON_CPU = enabled


def use_triton(tensor: torch.Tensor) -> bool:
    """True if work on this tensor belongs to the Triton path."""
    return HAS_TRITON and (tensor.is_cuda or _TRITON_ON_CPU)
