"""Run a compiled function on torch's own OpenMP threads.

A second thread pool beside torch's would fight it for the cores: torch's threads spin for a while after each product.
`GOMP_parallel` is the entry that GCC's OpenMP code calls, in libgomp and in LLVM's and Intel's runtimes alike.
"""

from __future__ import annotations

import ctypes
import functools
import logging

logger = logging.getLogger(__name__)
_RUNTIMES = ("libgomp", "libiomp5", "libomp")


@functools.lru_cache(maxsize=1)
def openmp_parallel():
    """``GOMP_parallel`` of the OpenMP runtime that torch has loaded, or None where it has none."""
    import torch  # noqa: F401  (loads its runtime)

    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split()[-1] for line in maps if any(name in line for name in _RUNTIMES)}
    for path in sorted(paths, key=lambda p: "torch" not in p):
        function = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
        if function is not None:
            function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            function.restype = None
            return function
    logger.warning("torch has no OpenMP runtime in this process: attention runs on one core")
    return None


def run_on_team(address: int, block: int, threads: int) -> None:
    """Call the function at `address`, ``void (*)(void *)``, with `block` on `threads` threads, and wait for all."""
    parallel = openmp_parallel()
    if threads > 1 and parallel is not None:
        parallel(address, block, threads, 0)
    else:
        _call(address)(block)


@functools.cache
def _call(address: int):
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
