"""Imported once by the fork server (see `forkserver`): what SGLang's processes would each import."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal

from sglang_dspark.cpu.processes import forkserver

MODULES = (
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
    "sglang_dspark.cpu.attention.kernel",
)
PR_SET_PDEATHSIG = 1


def _become_fork_server() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGQUIT, lambda *_: os.kill(os.getppid(), signal.SIGQUIT))
    server = os.getpid()

    def outlive_a_drain(*_) -> None:
        # A service manager signals the whole group: the engine drains its requests, and needs its processes for that.
        # The fork server goes when its parent does; a forked process that set no handler of its own goes now.
        if os.getpid() != server:
            os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, outlive_a_drain)


_become_fork_server()
for module in MODULES:
    importlib.import_module(module)
forkserver.make_known()
gc.freeze()  # the children's collections then leave the shared pages alone
