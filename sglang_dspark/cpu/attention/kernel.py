"""Paged attention for a CPU, compiled by numba's LLVM when the server starts: no C compiler, x86-64 and arm64 alike.

One call serves a whole batch of one layer. Work is cut into (request, kv head) items, which the threads of torch's own
OpenMP team take from a shared counter; each item reads its keys and values straight from the pool, once for all query
heads and rows, so nothing is gathered, padded or converted in memory. torch's fused attention needs both: at 16 requests
of 512 tokens its gather alone costs more than all of this (benchmarks/results/cpu_overhead.md), and a prompt's chunk of
512 rows takes it two to four times as long.

The softmax is the online one (Milakov and Gimelshein 2018) over tiles of keys, accumulated in float32. A row's result
depends on its query and its keys only, to the last bit: not on the rows beside it, nor on the threads.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import numba
import numpy as np
import torch
from numba import carray, cfunc, types

from sglang_dspark.cpu.attention import addresses, vectors
from sglang_dspark.cpu.attention.addresses import address, i32_pointer, i64_as_f64, i64_pointer, take_next, u32_as_f32
from sglang_dspark.cpu.attention.vectors import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    ITEMSIZE,
    LANES,
    largest,
    load_transposed,
    load_widened,
    multiply,
    prefetch,
    store_narrowed,
    total,
)  # fmt: skip

TILE = 32
LOG2_E = 1.4426950408889634
# The argument block: one int64 per field, so that one pointer carries a call through OpenMP.
FIELDS = (
    "counter", "items", "q", "out", "keys_pool", "values_pool", "req_to_token", "pool_rows", "keys", "rows", "first_row",
    "kv_heads", "item_heads", "group", "q_stride", "out_stride", "key_stride", "value_stride", "req_to_token_stride",
    "causal", "scale",
)  # fmt: skip
FIELD = {name: index for index, name in enumerate(FIELDS)}
(_COUNTER, _ITEMS, _Q, _OUT, _KEYS_POOL, _VALUES_POOL, _REQ_TO_TOKEN, _POOL_ROWS, _KEYS, _ROWS, _FIRST_ROW,
 _KV_HEADS, _ITEM_HEADS, _GROUP, _Q_STRIDE, _OUT_STRIDE, _KEY_STRIDE, _VALUE_STRIDE, _REQ_TO_TOKEN_STRIDE,
 _CAUSAL, _SCALE) = range(len(FIELDS))  # fmt: skip


@numba.njit(inline="always")
def _exp2(x):
    """2^x for x <= 0, to 2e-7: round, a polynomial of degree 6 on [-1/2, 1/2], and the exponent's bits."""
    x = max(x, np.float32(-126.0))
    whole = np.rint(x)
    f = x - whole
    p = np.float32(1.5403530e-4)
    p = p * f + np.float32(1.3333558e-3)
    p = p * f + np.float32(9.6181291e-3)
    p = p * f + np.float32(5.5504109e-2)
    p = p * f + np.float32(2.4022651e-1)
    p = p * f + np.float32(6.9314718e-1)
    p = p * f + np.float32(1.0)
    return p * u32_as_f32(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23))


KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


@functools.cache
def attention_kernel(dtype: torch.dtype, head_dim: int) -> int:
    """Compile (or load from numba's cache) the kernel of one dtype and head size; its address, ``void (*)(void *)``.

    Raises:
        ValueError: a dtype other than bfloat16, float16 and float32.
    """
    if dtype not in KINDS:
        raise ValueError(f"attention on a CPU reads bfloat16, float16 or float32, not {dtype}")
    return _compile(KINDS[dtype], head_dim, digest_of_parts()).address


def digest_of_parts() -> int:
    """numba's cache looks at this file's date, not at those of what it imports: their content is part of the key."""
    sources = [Path(module.__file__).read_bytes() for module in (addresses, vectors)]
    return int.from_bytes(hashlib.sha256(b"".join(sources)).digest()[:4])


@numba.njit(inline="always")
def _find_rows(args, slots, start, itemsize, key_rows, value_rows):
    """Addresses of the slots from `start` on; behind the last key, the last one again (its weight will be zero)."""
    key_step, value_step = args[_KEY_STRIDE] * itemsize, args[_VALUE_STRIDE] * itemsize
    last = len(slots) - 1
    for t in range(TILE):
        slot = np.int64(slots[min(start + t, last)])
        key_rows[t] = args[_KEYS_POOL] + slot * key_step
        value_rows[t] = args[_VALUES_POOL] + slot * value_step


@numba.njit(inline="always")
def _multiply_rows(n, a, b, c, keep, depth, columns, accumulate):
    """All n rows of a product, in blocks whose sums stay in registers."""
    for _ in range(n // 4):
        multiply(a, b, c, keep, 4, depth, columns, accumulate)
        a, c, keep = a + 4 * 4 * depth, c + 4 * 4 * columns, keep + 4 * 4
    if n % 4 == 3:
        multiply(a, b, c, keep, 3, depth, columns, accumulate)
    elif n % 4 == 2:
        multiply(a, b, c, keep, 2, depth, columns, accumulate)
    elif n % 4 == 1:
        multiply(a, b, c, keep, 1, depth, columns, accumulate)


@numba.njit(inline="always")
def _weigh(s, seen, top, norm, j):
    """Scores of one row's tile to weights, in place; what the sums so far must be multiplied by."""
    if seen < TILE:
        for t in range(TILE):
            s[t] = s[t] if t < seen else np.float32(-1e30)
    best = max(top[j], largest(address(s), TILE))
    for t in range(TILE):
        s[t] = _exp2(s[t] - best)
    if seen < TILE:
        for t in range(TILE):
            s[t] = s[t] if t < seen else np.float32(0)
    shrink = _exp2(top[j] - best)
    top[j] = best
    norm[j] = norm[j] * shrink + total(address(s), TILE)
    return shrink


@numba.njit(inline="always")
def _scratch(n, heads, size, width):
    """What one thread needs for `heads` kv heads of n rows each, and for a tile of keys (transposed) and of values."""
    return (
        np.empty((heads, n, size), np.float32),  # queries
        np.empty((heads, n, width), np.float32),  # weighted sums of values
        np.empty((heads, n), np.float32),  # largest score
        np.empty((heads, n), np.float32),  # sum of weights
        np.empty((n, TILE), np.float32),  # scores, then weights
        np.empty(n, np.float32),  # what the weighted sums are multiplied by
        np.empty((size, TILE), np.float32),
        np.zeros((TILE, width), np.float32),
        np.empty((2, TILE), np.int64),  # addresses of the keys of this tile and of the next
        np.empty((2, TILE), np.int64),  # and of the values
    )


@numba.njit(inline="always")
def _begin(args, first, g, n, q, acc, top, norm, kind, size):
    scale = np.float32(i64_as_f64(args[_SCALE]) * LOG2_E)
    group = args[_GROUP]
    for j in range(n):
        head = (first + j // group) * args[_Q_STRIDE] + (g * group + j % group) * size
        load_widened(args[_Q] + head * ITEMSIZE[kind], address(q[j]), kind, size)
        for d in range(size):
            q[j, d] *= scale
        for d in range(acc.shape[1]):
            acc[j, d] = np.float32(0)
        top[j], norm[j] = np.float32(-1e30), np.float32(0)


@numba.njit(inline="always")
def _finish(args, first, g, n, acc, norm, kind, size):
    group = args[_GROUP]
    for j in range(n):
        inverse = np.float32(1) / norm[j]
        for d in range(size):
            acc[j, d] *= inverse
        head = (first + j // group) * args[_OUT_STRIDE] + (g * group + j % group) * size
        store_narrowed(address(acc[j]), args[_OUT] + head * ITEMSIZE[kind], kind, size)


@numba.njit(inline="always")
def _attend(args, slots, next_slots, first, rows, g0, heads, scratch, kind, size, width):
    """Some kv heads of one request: all its rows and query heads against all its keys."""
    q, acc, top, norm, s, shrink, keys, values, key_rows, value_rows = scratch
    n, itemsize = rows * args[_GROUP], ITEMSIZE[kind]
    for h in range(heads):
        _begin(args, first, g0 + h, n, q[h], acc[h], top[h], norm[h], kind, size)
    _find_rows(args, slots, 0, itemsize, key_rows[1], value_rows[1])
    for t0 in range(0, len(slots), TILE):
        for t in range(TILE):
            key_rows[0, t], value_rows[0, t] = key_rows[1, t], value_rows[1, t]
        if t0 + TILE < len(slots):
            _find_rows(args, slots, t0 + TILE, itemsize, key_rows[1], value_rows[1])
        else:
            _find_rows(args, next_slots, 0, itemsize, key_rows[1], value_rows[1])
        for h in range(heads):
            offset = (g0 + h) * size * itemsize
            for t in range(0, TILE, LANES):
                load_transposed(address(key_rows[0, t:]), offset, address(keys[0, t:]), TILE, kind, size)
            for t in range(TILE):
                load_widened(value_rows[0, t] + offset, address(values[t]), kind, size)
                prefetch(key_rows[1, t] + offset, kind, size)
            _multiply_rows(n, address(q[h]), address(keys), address(s), 0, size, TILE, False)
            share = (TILE + n - 1) // n
            for j in range(n):
                for t in range(j * share, min(TILE, (j + 1) * share)):
                    prefetch(value_rows[1, t] + offset, kind, size)
                seen = min(TILE, len(slots) - t0)
                if args[_CAUSAL]:
                    seen = min(seen, len(slots) - rows + j // args[_GROUP] + 1 - t0)
                if seen > 0:
                    shrink[j] = _weigh(s[j], seen, top[h], norm[h], j)
                else:
                    s[j], shrink[j] = np.float32(0), np.float32(1)
            _multiply_rows(n, address(s), address(values), address(acc[h]), address(shrink), TILE, width, True)
    for h in range(heads):
        _finish(args, first, g0 + h, n, acc[h], norm[h], kind, size)


@numba.njit(inline="always")
def _slots_of(args, r):
    keys = carray(i64_pointer(args[_KEYS]), r + 1)
    pool_rows = carray(i64_pointer(args[_POOL_ROWS]), r + 1)
    return carray(i32_pointer(args[_REQ_TO_TOKEN] + pool_rows[r] * args[_REQ_TO_TOKEN_STRIDE] * 4), keys[r])


@numba.njit(inline="always")
def _most_rows(args, requests):
    rows = carray(i64_pointer(args[_ROWS]), requests)
    most = 0
    for r in range(requests):
        most = max(most, rows[r])
    return most


def _compile(kind: int, size: int, version: int):
    width = -(-size // LANES) * LANES  # of a row of sums: whole vectors

    @cfunc(types.void(types.CPointer(types.int64)), cache=True, fastmath=True, error_model="numpy", nogil=True)
    def team_member(block):
        _ = version  # a cell of this closure is a part of numba's cache key
        args = carray(block, len(FIELDS))
        heads = args[_ITEM_HEADS]
        parts = args[_KV_HEADS] // heads  # items of one request
        requests = args[_ITEMS] // parts
        first = carray(i64_pointer(args[_FIRST_ROW]), requests)
        rows = carray(i64_pointer(args[_ROWS]), requests)
        scratch = _scratch(_most_rows(args, requests) * args[_GROUP], heads, size, width)
        item = take_next(block)
        while item < args[_ITEMS]:
            after = take_next(block)
            r, g = item // parts, item % parts * heads
            slots, next_slots = _slots_of(args, r), _slots_of(args, min(after, args[_ITEMS] - 1) // parts)
            _attend(args, slots, next_slots, first[r], rows[r], g, heads, scratch, kind, size, width)
            item = after

    return team_member
