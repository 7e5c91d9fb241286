"""Run SGLang's server in this process, so that it ends as a command should: cleanly, with one line that says why.

SGLang answers a child's death by killing its own process group with SIGKILL, which leaves the reason somewhere in a
child's traceback. Here each child notes its last error in a small file, and the parent prints it last, stops what is
left, and exits with status 1.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

EXIT_FAILED = 1
# Loggers on which SGLang's child processes report the exception that ends them.
_CHILD_LOGGERS = (
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.data_parallel_controller",
)


def launch(server_args: ServerArgs, on_ready: Callable[[], None]) -> int:
    """Serve until a signal ends it.

    Args:
        server_args: SGLang's arguments, not resolved yet.
        on_ready: called once, when the server answers requests.

    Returns: the exit status: 0 after SIGTERM (running requests are finished first), 1 where the server failed (its
        reason is the last line on stderr). Ctrl-C, and a SIGTERM during the start, end the process here with 128 and
        the signal's number.
    """
    descriptor, name = tempfile.mkstemp(prefix="sglang-dspark-", suffix=".failure")
    os.close(descriptor)
    failure = Path(name)
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, functools.partial(_end_after_signal, failure))
    try:
        _run(server_args, failure, on_ready)
        return 0
    except SystemExit as request:
        return _status_of(request)
    except Exception as error:
        logging.getLogger(__name__).debug("the server failed to start", exc_info=True)
        _report(failure, f"{type(error).__name__}: {one_line(error)}")
        return EXIT_FAILED
    finally:
        stop_children()
        failure.unlink(missing_ok=True)


def _run(server_args: ServerArgs, failure: Path, on_ready: Callable[[], None]) -> None:
    if server_args.encoder_only or server_args.smg_grpc_mode or server_args.grpc_mode or server_args.use_ray:
        from sglang.launch_server import run_server

        run_server(server_args)  # these have no ready signal that we could pass on
        return
    from sglang.srt.entrypoints.http_server import launch_server

    launch_server(
        server_args,
        init_tokenizer_manager_func=functools.partial(_init_tokenizer_manager, failure),
        run_scheduler_process_func=functools.partial(run_scheduler, str(failure)),
        run_detokenizer_process_func=functools.partial(run_detokenizer, str(failure)),
        launch_callback=on_ready,
    )


def run_scheduler(failure: str, *args, **kwargs) -> None:
    """SGLang's scheduler process, noting in the file `failure` why it ended."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    _run_child(failure, run_scheduler_process, args, kwargs)


def run_detokenizer(failure: str, *args, **kwargs) -> None:
    """SGLang's detokenizer process, noting in the file `failure` why it ended."""
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    _run_child(failure, run_detokenizer_process, args, kwargs)


def _run_child(failure: str, process: Callable, args: tuple, kwargs: dict) -> None:
    # Ctrl-C and many supervisors signal the whole process group; the parent decides what that means, and stops us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note = FailureNote(Path(failure))
    for name in _CHILD_LOGGERS:
        logging.getLogger(name).addHandler(note)
    try:
        process(*args, **kwargs)
    except Exception as error:
        note.write(f"{type(error).__name__}: {one_line(error)}")
        raise


class FailureNote(logging.Handler):
    """Keeps the last line of the first error that a child logs (SGLang logs a whole traceback as one message)."""

    def __init__(self, file: Path) -> None:
        super().__init__(level=logging.ERROR)
        self.file = file

    def emit(self, record: logging.LogRecord) -> None:
        self.write(last_line(record.getMessage()))

    def write(self, reason: str) -> None:
        if self.file.exists() and not self.file.stat().st_size:  # later errors follow from the first
            self.file.write_text(reason + "\n")


def _init_tokenizer_manager(failure: Path, server_args: ServerArgs, port_args):
    """SGLang's own, with our answer to a child's death instead of SIGKILL for everybody, at start and later."""
    from sglang.srt.entrypoints.engine import init_tokenizer_manager
    from sglang.srt.managers.tokenizer_manager import SignalHandler

    class ReportingSignalHandler(SignalHandler):
        def running_phase_sigquit_handler(self, signum=None, frame=None) -> NoReturn:
            self.tokenizer_manager.dump_requests_before_crash()
            _end_after_child_failure(failure)

    signal.signal(signal.SIGQUIT, lambda signum, frame: _end_after_child_failure(failure))
    tokenizer_manager, template_manager = init_tokenizer_manager(server_args, port_args)
    tokenizer_manager.signal_handler_class = ReportingSignalHandler
    return tokenizer_manager, template_manager


def _end_after_child_failure(failure: Path) -> NoReturn:
    """End this process at once: it may be anywhere, in the middle of the event loop or of an import."""
    stop_children()
    _report(failure, "a process of the server died without saying why (killed, or out of memory?)")
    _leave(failure, EXIT_FAILED)


def stop_children(grace_seconds: float = 10.0) -> None:
    """Kill every process below this one and wait until they are gone."""
    import psutil

    signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # SGLang's watchdog reports dying children with it
    children = psutil.Process().children(recursive=True)
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(children, timeout=grace_seconds)


def _report(failure: Path, otherwise: str) -> None:
    noted = failure.read_text().strip() if failure.exists() else ""
    print(f"sglang-dspark serve: the server stopped: {noted or otherwise}", file=sys.stderr, flush=True)


def _end_after_signal(failure: Path, signum: int, frame) -> NoReturn:
    """End at once. An exception would not do: imports and callbacks that run during the start may swallow it."""
    stop_children()
    _leave(failure, 128 + signum)


def _leave(failure: Path, status: int) -> NoReturn:
    failure.unlink(missing_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _status_of(request: SystemExit) -> int:
    if isinstance(request.code, str):
        print(request.code, file=sys.stderr)
    return request.code if isinstance(request.code, int) else EXIT_FAILED if request.code else 0


def one_line(error: BaseException) -> str:
    """An exception's message without line breaks."""
    return " ".join(str(error).split()) or "(no message)"


def last_line(text: str) -> str:
    """The last line of `text` that says something: of a traceback, the exception."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "(no message)"
