"""Which numbers of rows a product gives the same bits for, found by trying, and how to run the others.

The libraries behind torch choose a kernel by the number of rows and share the rows out among threads, and two kernels may
add up the terms of one element in another order: then a request's text depends on who else is in the batch. Which counts
differ depends on processor, shape, dtype and threads, so every process that holds a target tries its own.

The operands are made so that the terms of every element cancel in pairs, in random places. What is left is nothing but
the rounding of the sum, so another order shows in nearly every element, where ordinary operands show it in one of
thousands once rounded to bfloat16. All rows are the same row: rows that come out unlike each other show a count whose
result depends on the place.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

# Every count up to the blocks that today's kernels cut rows into, then edges of larger ones, up to a prompt's chunk.
COUNTS = (*range(1, 18), 32, 33, 64, 128, 512)
# With more weights than this (a vocabulary's) a chunk is not tried: their rows are those of decode and verify steps.
WIDE_WEIGHTS, WIDE_COUNT = 1 << 24, 128
_REPEATED_OUTPUTS = 256


@dataclass(frozen=True)
class RowCounts:
    """How to run a product of n rows so that no row's bits depend on n.

    Attributes:
        runs: entry n is the number of rows to run n rows as, at least n; entry 0 is 0.
        cut: whether more rows than `runs` has entries for are run in parts; otherwise they run as they are.
        exact: False where every count tried depended on the place of a row: then nothing helps and `runs` changes nothing.
    """

    runs: tuple[int, ...]
    cut: bool = False
    exact: bool = True

    @property
    def padded(self) -> tuple[int, ...]:
        """The counts that run with rows of zeros below them."""
        return tuple(n for n, run in enumerate(self.runs) if run != n)

    @property
    def changes_nothing(self) -> bool:
        return not self.padded and not self.cut

    def apply(self, product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """``product(x)`` for x ``[rows, inputs]``, run in numbers of rows that agree with each other."""
        rows, most = x.shape[0], len(self.runs) - 1
        if rows > most and self.cut:
            return torch.cat([self.apply(product, part) for part in x.split(most)])
        run = self.runs[rows] if rows <= most else rows
        if run == rows:
            return product(x)
        return product(torch.cat((x, _zeros(run - rows, x.shape[1], x.dtype))))[:rows]


@functools.cache
def _zeros(rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(rows, size, dtype=dtype)


def row_counts(inputs: int, outputs: int, dtype: torch.dtype, bias: bool = False) -> RowCounts:
    """The row counts of ``linear`` with weights ``[outputs, inputs]`` on the threads that torch has now."""
    return _row_counts(inputs, outputs, dtype, bias, torch.get_num_threads())


@functools.cache
def _row_counts(inputs: int, outputs: int, dtype: torch.dtype, bias: bool, threads: int) -> RowCounts:
    counts = [n for n in COUNTS if n <= WIDE_COUNT or inputs * outputs <= WIDE_WEIGHTS]
    row, weight, added = cancelling_operands(inputs, outputs, dtype)
    with torch.inference_mode():
        return choose({n: signature(row, weight, added if bias else None, n) for n in counts})


def cancelling_operands(inputs: int, outputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """A row ``[1, inputs]`` and weights ``[outputs, inputs]`` whose exact product is nought, and a bias of its rounding's size."""
    generator = torch.Generator().manual_seed(0)
    half, places = inputs // 2, torch.randperm(inputs, generator=generator)

    def wide(*shape: int) -> torch.Tensor:
        """Normal numbers over several powers of two."""
        return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()

    row, weight = torch.zeros(1, inputs), torch.zeros(min(outputs, _REPEATED_OUTPUTS), inputs)
    terms, factors = wide(half), wide(len(weight), half)
    for place, sign in ((places[:half], 1), (places[half : 2 * half], -1)):
        row[0, place], weight[:, place] = terms, sign * factors
    repeats = -(-outputs // len(weight))
    bias = 2.0**-18 * wide(outputs)
    return row.to(dtype), weight.to(dtype).repeat(repeats, 1)[:outputs], bias.to(dtype)


def signature(row: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: int) -> bytes | None:
    """The bits that every one of `rows` equal rows gets, or None where they do not all get the same."""
    results = linear(row.repeat(rows, 1), weight, bias)
    return results[0].view(torch.uint8).numpy().tobytes() if bool((results == results[0]).all()) else None


def choose(signatures: dict[int, bytes | None]) -> RowCounts:
    """The runs under which the largest group of counts with one signature serves all.

    Args:
        signatures: count tried (1 among them) -> what `signature` said.

    Between two tried counts with the group's bits, and above the largest if it has them, they are taken for granted; a
    count beside one that differs runs as the next of the group.
    """
    groups = defaultdict(list)
    for count in sorted(signatures):
        if signatures[count] is not None:
            groups[signatures[count]].append(count)
    if not groups:
        return RowCounts(tuple(range(max(signatures) + 1)), exact=False)
    group = max(groups.values(), key=lambda counts: (len(counts), counts[-1]))
    tried, good, runs = sorted(signatures), set(group), [0]
    for n in range(1, group[-1] + 1):
        around = {max(t for t in tried if t <= n), min(t for t in tried if t >= n)}
        runs.append(n if around <= good else min(g for g in group if g >= n))
    return RowCounts(tuple(runs), cut=group[-1] < tried[-1])
