"""A CUDA graph on a CPU: what was launched while a forward was captured is launched again, with the same arguments.

While `record` runs, every torch operation and every launch of a Triton kernel (under its interpreter) is written down
with its arguments. `replay` runs that list, not the Python code that made it: tensors are read from where they were at
capture, numbers are those of the capture, and results land where they landed then. So a host value that a step changes,
or a tensor that a step replaces instead of filling, has no effect on a replay, as on a GPU. Reading a tensor's value while
capturing raises, as a capture on a GPU does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten.masked_select.default}
UNWRITTEN = {aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default}


class ReadsBack(RuntimeError):
    """A captured forward asked the host for a tensor's value."""


class RecordedGraph(TorchDispatchMode):
    """Launches in order, each with the tensors that its results went to."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Callable[[], None]] = []
        self.output: object = None
        self.paused = False

    def record(self, function: Callable[[], object]) -> object:
        with self, _kernels_recorded_by(self):
            self.output = function()
        return self.output

    def replay(self) -> object:
        for launch in self.launches:
            launch()
        return self.output

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if func in READS or (
            func is aten.index.Tensor and any(t is not None and t.dtype == torch.bool for t in args[1])
        ):
            raise ReadsBack(f"{func} while a graph is captured")
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            self.launches.append(lambda: func(*args, **kwargs))
        elif func not in UNWRITTEN:
            given = {_memory(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            fresh = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and _memory(t) not in given]
            if fresh:
                self.launches.append(lambda: _again(func, args, kwargs, result))
        return result


def _again(func, args, kwargs, result) -> None:
    for there, now in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
        if isinstance(there, torch.Tensor):
            there.copy_(now)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextlib.contextmanager
def _kernels_recorded_by(graph: RecordedGraph) -> Iterator[None]:
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def recorded(kernel, *args, grid, warmup, **kwargs):
        def launch() -> None:
            run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

        graph.launches.append(launch)
        graph.paused = True  # the interpreter's own torch operations are no launches
        try:
            launch()
        finally:
            graph.paused = False

    InterpretedFunction.run = recorded
    try:
        yield
    finally:
        InterpretedFunction.run = run


class RecordedBackend:
    """SGLang's graph backend (`resolve_decode_backend`) over recorded graphs."""

    def __init__(self, runner) -> None:
        self.graphs: dict[object, RecordedGraph] = {}

    capture_session = replay_session = staticmethod(lambda *_: contextlib.nullcontext())

    def capture_one(self, key, function, capture_inputs=None, post_warmup_hook=None) -> None:
        self.graphs[key] = RecordedGraph()
        self.graphs[key].record(function)

    def can_run(self, forward_batch, key) -> bool:
        return key in self.graphs

    def replay(self, key, forward_batch, **_) -> object:
        return self.graphs[key].replay()
