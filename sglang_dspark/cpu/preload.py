"""Imported once by the fork server (see `forkserver`): what SGLang's processes would each import."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal

from sglang_dspark.cpu import forkserver

MODULES = (
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
    "sglang_dspark.cpu.kernel",
)
PR_SET_PDEATHSIG = 1


def _become_fork_server() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGQUIT, lambda *_: os.kill(os.getppid(), signal.SIGQUIT))


_become_fork_server()
for module in MODULES:
    importlib.import_module(module)
forkserver.install()
gc.freeze()  # the children's collections then leave the shared pages alone
