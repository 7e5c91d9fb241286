"""Freed memory stays with the process: a step's temporaries are as large as the last step's."""

from __future__ import annotations

import ctypes
import logging

logger = logging.getLogger(__name__)
KEPT_BYTES = 1 << 30
_MMAP_THRESHOLDS = (KEPT_BYTES, 32 << 20)  # glibc before 2.35 takes no more than the second
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt


def keep_freed_memory() -> bool:
    """Have glibc's malloc keep up to `KEPT_BYTES` of freed memory instead of handing it back; True if it does.

    Otherwise what a step frees (softmax rows, logits) goes back to the kernel whenever it happens to lie last, and every
    page of it is faulted in and zeroed again in the next step: acceptance of eight requests took 5 ms instead of 0.9.
    Without glibc (musl, jemalloc preloaded) nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # The threshold of mmap comes first: the other alone ends its growing, and all temporaries would be mapped anew.
    kept = mallopt is not None and any(mallopt(_MMAP_THRESHOLD, size) for size in _MMAP_THRESHOLDS)
    if not (kept and mallopt(_TRIM_THRESHOLD, KEPT_BYTES)):
        logger.info("this C library's malloc cannot be told to keep freed memory; steps may take longer")
        return False
    return True
