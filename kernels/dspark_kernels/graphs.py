"""CUDA graphs keyed by the number of ragged rows: choose a tier, copy in, pad, replay, slice out.

Above the last tier, and wherever there is no CUDA, the same callable runs eagerly *over the same static buffers* with
the same padding, so what a CPU test sees of padding and staleness is what a GPU does. Source: none (SGLang's and
mini-sglang's graph runners key by batch size; here rows are the unit, since windows differ).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .ragged import next_tier

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class RowBuffer:
    """A static input whose first axis is rows.

    Fields: shape of one row, dtype, and `padding`, the value that rows past the live ones carry: it must be harmless
    (a cache slot that nobody owns, position 0), for the callable computes on it.
    """

    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.int64
    padding: float = 0


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    outputs: dict[str, torch.Tensor]
    bytes: int


class RaggedGraph:
    """A callable over ragged rows, captured once per tier.

    Args:
        function: takes the buffers by name, cut to the tier, and returns a dict of tensors whose first axis
            is rows. It must be safe to capture: no synchronisation, no allocation kept between calls.
        tiers: row counts to capture, in any order; the largest is the capacity of the static buffers.
        rows: names and kinds of the inputs.
        device: where the buffers live. capture: False runs eagerly over the same buffers even on CUDA.
    """

    def __init__(
        self,
        function: Callable[..., Tensors],
        tiers: Sequence[int],
        rows: Mapping[str, RowBuffer],
        device: torch.device | str = "cpu",
        capture: bool = True,
    ):
        if not tiers or min(tiers) < 1 or not rows:
            raise ValueError("RaggedGraph needs at least one tier of at least one row, and a row buffer")
        self.function = function
        self.tiers = tuple(sorted(set(tiers)))
        self.device = torch.device(device)
        self._row_specs = dict(rows)
        self._capture = capture and self.device.type == "cuda"
        self._captured: dict[int, _Captured] = {}
        self._pool = None
        self.capacity = self.tiers[-1]
        self._rows = self._row_buffers(self.capacity)

    def _row_buffers(self, capacity: int) -> dict[str, torch.Tensor]:
        return {
            name: torch.full((capacity, *spec.shape), spec.padding, dtype=spec.dtype, device=self.device)
            for name, spec in self._row_specs.items()
        }

    def tier_for(self, rows: int) -> int:
        """The rows that a batch of `rows` is padded to (itself above the last tier)."""
        return next_tier(rows, self.tiers)

    @property
    def bytes_per_tier(self) -> dict[int, int]:
        """Device memory that the capture of each tier took (tiers share one pool: the largest comes first)."""
        return {tier: captured.bytes for tier, captured in sorted(self._captured.items())}

    def capture_all(self) -> None:
        """Capture every tier, the largest first, so that the smaller ones fit in its memory. Nothing to do on a CPU.

        Every buffer must hold values that the callable can run on; call once with real inputs, or rely on padding.
        """
        if self._capture:
            for tier in reversed(self.tiers):
                if tier not in self._captured:
                    self._captured[tier] = self._capture_tier(tier)

    def _capture_tier(self, tier: int) -> _Captured:
        torch.cuda.synchronize(self.device)
        before = torch.cuda.mem_get_info(self.device)[0]
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):  # warm up: libraries allocate their workspaces outside of the capture
            for _ in range(2):
                self.function(**self._arguments(tier))
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = dict(self.function(**self._arguments(tier)))
        self._pool = self._pool or graph.pool()
        torch.cuda.synchronize(self.device)
        return _Captured(graph, outputs, max(0, before - torch.cuda.mem_get_info(self.device)[0]))

    def _arguments(self, tier: int) -> dict[str, torch.Tensor]:
        return {name: buffer[:tier] for name, buffer in self._rows.items()}

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run on `inputs` and return the outputs cut to the live rows.

        The outputs are views of static memory: they hold until the next call.

        Raises:
            ValueError: an input is missing, unknown, of another shape or dtype, or larger than its buffer.
        """
        rows = self._live_rows(inputs)
        tier = self.tier_for(rows)
        if tier > self.capacity:  # an eager batch above the last tier: the static buffers belong to the captured graphs
            outputs = self._run_larger(rows, inputs)
        else:
            self._copy_in(inputs, rows, tier)
            outputs = self._replay(tier)
        return {name: value[:rows] for name, value in outputs.items()}

    def _replay(self, tier: int) -> Tensors:
        if self._capture and tier in self.tiers:
            if tier not in self._captured:
                self._captured[tier] = self._capture_tier(tier)
            self._captured[tier].graph.replay()
            return self._captured[tier].outputs
        return self.function(**self._arguments(tier))

    def _run_larger(self, rows: int, inputs: Tensors) -> Tensors:
        kept = self._rows
        try:
            self._rows = self._row_buffers(rows)
            self._copy_in(inputs, rows, rows)
            return self.function(**self._arguments(rows))
        finally:
            self._rows = kept

    def _live_rows(self, inputs: Tensors) -> int:
        if inputs.keys() != self._row_specs.keys():
            raise ValueError(f"inputs must be exactly {sorted(self._row_specs)}, got {sorted(inputs)}")
        counts = {name: inputs[name].shape[0] for name in self._row_specs}
        if len(set(counts.values())) != 1:
            raise ValueError(f"row inputs disagree on the number of rows: {counts}")
        return next(iter(counts.values()))

    def _copy_in(self, inputs: Tensors, rows: int, tier: int) -> None:
        """Live rows, then padding up to the tier: a stale row of an earlier, larger batch must not run again."""
        for name, spec in self._row_specs.items():
            self._check(name, inputs[name], spec.shape, spec.dtype)
            buffer = self._rows[name]
            buffer[:rows].copy_(inputs[name], non_blocking=True)
            buffer[rows:tier].fill_(spec.padding)

    @staticmethod
    def _check(name: str, value: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if tuple(value.shape[1:]) != tuple(shape) or value.dtype != dtype:
            raise ValueError(
                f"{name} must be [..., {', '.join(map(str, shape))}] of {dtype}, got {tuple(value.shape)} {value.dtype}"
            )
