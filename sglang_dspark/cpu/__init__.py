"""SGLang on a plain CPU: platform, attention and KV pool for x86-64 and arm64 without compiled CPU kernels.

Nothing here imports SGLang or torch when the package is imported: `activate` runs in every SGLang process.
"""

from __future__ import annotations

import os

PLATFORM_CLASS = "sglang_dspark.cpu.platform.DSparkCpuPlatform"
ATTENTION_BACKEND = "dspark_cpu"
EXACTNESS = "dspark_exactness"  # the attribute of a target in which `exact` leaves what it found
CPUINFO = "/proc/cpuinfo"


def activate() -> str | None:
    """Entry point of group ``sglang.srt.platforms``: our platform's dotted name where no accelerator is present.

    Returns:
        The class's dotted name, or None where torch sees an accelerator or where the user asked for SGLang's own
        CPU engine (``SGLANG_USE_CPU_ENGINE=1``, a build of SGLang with compiled CPU kernels).
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    return None if accelerator_present() else PLATFORM_CLASS


def accelerator_present() -> bool:
    """Whether torch sees a CUDA, ROCm, XPU, NPU, MUSA or MPS device in this process."""
    import torch

    if torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available():
        return True
    return any(hasattr(torch, name) and getattr(torch, name).is_available() for name in ("npu", "musa"))


def default_dtype() -> str:
    """The dtype ``--dtype auto`` becomes on this processor: ``bfloat16`` where it multiplies bfloat16, else ``float32``.

    x86-64 needs AVX512-BF16 or AMX-BF16, arm64 needs the BF16 extension; elsewhere torch converts every product's
    operands and bfloat16 is slower than float32.
    """
    import torch

    if os.uname().machine in ("aarch64", "arm64"):
        return "bfloat16" if _arm_has_bf16() else "float32"
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bfloat16" if fast else "float32"


def _arm_has_bf16() -> bool:
    try:
        with open(CPUINFO, encoding="ascii", errors="replace") as cpuinfo:
            features = next((line for line in cpuinfo if line.startswith("Features")), "")
    except OSError:
        return False
    return "bf16" in features.split()
