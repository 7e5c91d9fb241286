"""Start SGLang's processes by forking one that has imported everything, instead of importing it all in each.

Importing SGLang costs 5 to 6 seconds of CPU time in each of its three processes, on a laptop more than the rest of
the start. Python's own fork server runs a process that imports once and never starts a thread, so forking it is safe;
the children share its pages. A second engine in one process starts in about two seconds.

Three things of `spawn` that SGLang relies on are kept:
- a child has the environment that its parent has now, not the one that the fork server started with;
- SIGQUIT from a failing child reaches the process that launched it (the children's parent is the fork server);
- nothing survives the launching process, even a killed one.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
from multiprocessing import context, forkserver

from sglang_dspark.contract.hooks import AFTER, BEFORE, Hook, register

logger = logging.getLogger(__name__)
START_METHOD = "dspark_forkserver"
PRELOAD = "sglang_dspark.cpu.processes.preload"
# SGLang reads some of its switches when a module is imported, so a change of these needs a new fork server.
IMPORT_TIME_PREFIXES = ("SGLANG_", "SGL_", "OMP_", "GOMP_", "KMP_", "MKL_", "NUMBA_")
# SGLang writes these itself for every engine; what it writes is the default.
_WRITTEN_BY_SGLANG = {
    "SGLANG_USE_CUDA_IPC_TRANSPORT": "0",
    "SGLANG_DISABLE_OUTLINES_DISK_CACHE": "0",
    "SGLANG_ENABLE_DETERMINISTIC_INFERENCE": "0",
    "SGLANG_ENABLE_TORCH_COMPILE": "0",
}
_started_with: dict[str, str] | None = None


class _InEnvironment:
    """A process target that first takes over the launching process's environment and forgets the fork server's."""

    def __init__(self, environment: dict[str, str], target) -> None:
        self.environment, self.target = environment, target

    def __call__(self, *args, **kwargs):
        os.environ.clear()
        os.environ.update(self.environment)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        multiprocessing.set_start_method(START_METHOD, force=True)  # a data-parallel controller starts ranks of its own
        return self.target(*args, **kwargs)


class _Process(context.ForkServerProcess):
    @staticmethod
    def _Popen(process):
        from multiprocessing.popen_forkserver import Popen

        start()
        process._target = _InEnvironment(dict(os.environ), process._target)
        return Popen(process)


class _Context(context.ForkServerContext):
    # Every process that is spawned from here on is told this name, and knows only Python's own.
    _name = "forkserver"
    Process = _Process


def make_known() -> None:
    """Make our start method known to `multiprocessing` in this process; the children need it too."""
    context._concrete_contexts.setdefault(START_METHOD, _Context())


def start() -> None:
    """Start the fork server if none runs that imported under the present switches; returns at once.

    Call it as early as possible: its imports then run beside the caller's own.
    """
    global _started_with
    switches = _import_time_switches()
    if _started_with is not None and _started_with != switches:
        forkserver._forkserver._stop()
    forkserver.set_forkserver_preload([PRELOAD])
    forkserver.ensure_running()
    _started_with = switches


def _import_time_switches() -> dict[str, str]:
    switches = {k: v for k, v in os.environ.items() if k.startswith(IMPORT_TIME_PREFIXES) and k != "SGLANG_RUN_ID"}
    return {k: v for k, v in switches.items() if _WRITTEN_BY_SGLANG.get(k) != v}


def use_for_sglang() -> None:
    """Register the hooks that make SGLang's engine start its processes this way (launching process only)."""
    if multiprocessing.parent_process() is not None or sys.platform != "linux":
        return
    make_known()
    register(HOOKS)


def _after_set_envs(result, *args, **kwargs):
    multiprocessing.set_start_method(START_METHOD, force=True)
    return result


def _spare_fork_server(parent_pid, include_parent=True, skip_pid=None, **kwargs):
    """An engine that shuts down kills all children of its process; the next engine wants the fork server again."""
    if not include_parent and parent_pid in (None, os.getpid()) and skip_pid is None:
        skip_pid = forkserver._forkserver._forkserver_pid
    return (parent_pid, include_parent, skip_pid), kwargs


HOOKS = (
    Hook("sglang.srt.entrypoints.engine:_set_envs_and_config", AFTER, _after_set_envs, ("server_args",)),
    Hook(
        "sglang.srt.utils.common:kill_process_tree",
        BEFORE,
        _spare_fork_server,
        ("parent_pid", "include_parent", "skip_pid", "wait_timeout"),
    ),
)
