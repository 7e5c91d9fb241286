"""Paged attention for a CPU, compiled by numba's LLVM when the server starts: no C compiler, x86-64 and arm64 alike.

One call serves a whole batch of one layer. Work is cut into (request, kv head) items, which the threads of torch's own
OpenMP team take from a shared counter; each item reads its keys and values straight from the pool, so nothing is
gathered, padded or converted in memory. torch's fused attention needs both: at 16 requests of 512 tokens its gather
alone costs more than all of this (benchmarks/results/cpu_overhead.md).

The softmax is the online one (Milakov and Gimelshein 2018) over tiles of keys, accumulated in float32.
"""

from __future__ import annotations

import functools

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, types
from numba.extending import intrinsic

TILE = 32
LOG2_E = 1.4426950408889634
# The argument block: one int64 per field, so that one pointer carries a call through OpenMP.
FIELDS = (
    "counter", "items", "q", "out", "keys_pool", "values_pool", "req_to_token", "pool_rows", "keys", "rows", "first_row",
    "kv_heads", "group", "q_stride", "out_stride", "key_stride", "value_stride", "req_to_token_stride", "causal",
    "scale",
)  # fmt: skip
FIELD = {name: index for index, name in enumerate(FIELDS)}
(_COUNTER, _ITEMS, _Q, _OUT, _KEYS_POOL, _VALUES_POOL, _REQ_TO_TOKEN, _POOL_ROWS, _KEYS, _ROWS, _FIRST_ROW,
 _KV_HEADS, _GROUP, _Q_STRIDE, _OUT_STRIDE, _KEY_STRIDE, _VALUE_STRIDE, _REQ_TO_TOKEN_STRIDE, _CAUSAL, _SCALE) = range(
    len(FIELDS)
)  # fmt: skip


def _bitcast(source, target, llvm_type):
    @intrinsic
    def cast(typingctx, value):
        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], llvm_type)

        return target(source), codegen

    return cast


_u32_as_f32 = _bitcast(types.uint32, types.float32, ir.FloatType())
_f32_as_u32 = _bitcast(types.float32, types.uint32, ir.IntType(32))
_i64_as_f64 = _bitcast(types.int64, types.float64, ir.DoubleType())


@intrinsic
def _half_to_f32(typingctx, value):
    def codegen(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def _f32_to_half(typingctx, value):
    def codegen(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


@intrinsic
def _take_next(typingctx, counter):
    """Add one to the int64 behind the pointer, atomically, and return what it was."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", args[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.CPointer(types.int64)), codegen


def _pointer_to(element):
    @intrinsic
    def cast(typingctx, address):
        pointer = types.CPointer(element)

        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(pointer))

        return pointer(types.int64), codegen

    return cast


_i64_pointer, _i32_pointer = _pointer_to(types.int64), _pointer_to(types.int32)
_u16_pointer, _f32_pointer = _pointer_to(types.uint16), _pointer_to(types.float32)


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
    return p * _u32_as_f32(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23))


@numba.njit(inline="always")
def _bf16_to_f32(x):
    return _u32_as_f32(np.uint32(x) << np.uint32(16))


@numba.njit(inline="always")
def _f32_to_bf16(x):
    bits = _f32_as_u32(x)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@numba.njit(inline="always")
def _same(x):
    return x


_CONVERSIONS = {
    torch.bfloat16: (_u16_pointer, _bf16_to_f32, _f32_to_bf16, 2),
    torch.float16: (_u16_pointer, _half_to_f32, _f32_to_half, 2),
    torch.float32: (_f32_pointer, _same, _same, 4),
}


@functools.cache
def attention_kernel(dtype: torch.dtype, head_dim: int) -> int:
    """Compile (or load from numba's cache) the kernel of one dtype and head size; its address, ``void (*)(void *)``.

    Raises:
        ValueError: a dtype other than bfloat16, float16 and float32.
    """
    if dtype not in _CONVERSIONS:
        raise ValueError(f"attention on a CPU reads bfloat16, float16 or float32, not {dtype}")
    return _compile(*_CONVERSIONS[dtype], head_dim).address


def _compile(pointer, widen, narrow, itemsize, D):
    @numba.njit(inline="always")
    def vector(base, index):
        """The `index`-th element behind the address `base`, as an array of one head."""
        return carray(pointer(base + index * itemsize), D)

    @numba.njit(fastmath=True, error_model="numpy", nogil=True)
    def attend(args, r, g, slots, row0, rows, length, acc, top, norm, qf, kt, vt, s):
        group, causal = args[_GROUP], args[_CAUSAL]
        scale = np.float32(_i64_as_f64(args[_SCALE]) * LOG2_E)
        n = rows * group
        for j in range(n):
            query = vector(args[_Q], (row0 + j // group) * args[_Q_STRIDE] + (g * group + j % group) * D)
            top[j], norm[j] = np.float32(-1e30), np.float32(0)
            for d in range(D):
                qf[j, d] = widen(query[d]) * scale
                acc[j, d] = np.float32(0)
        for t0 in range(0, length, TILE):
            tile = min(TILE, length - t0)
            for t in range(tile):
                slot = np.int64(slots[t0 + t])
                key = vector(args[_KEYS_POOL], slot * args[_KEY_STRIDE] + g * D)
                value = vector(args[_VALUES_POOL], slot * args[_VALUE_STRIDE] + g * D)
                for d in range(D):
                    kt[t, d] = widen(key[d])
                for d in range(D):
                    vt[t, d] = widen(value[d])
            for j in range(n):
                seen = tile
                if causal:
                    seen = min(tile, length - rows + j // group + 1 - t0)
                if seen <= 0:
                    continue
                best = np.float32(-1e30)
                for t in range(seen):
                    product = np.float32(0)
                    for d in range(D):
                        product += qf[j, d] * kt[t, d]
                    s[t] = product
                    best = max(best, product)
                best = max(top[j], best)
                shrink = _exp2(top[j] - best)
                top[j] = best
                total = np.float32(0)
                for t in range(seen):
                    p = _exp2(s[t] - best)
                    s[t] = p
                    total += p
                norm[j] = norm[j] * shrink + total
                for d in range(D):
                    acc[j, d] *= shrink
                for t in range(seen):
                    p = s[t]
                    for d in range(D):
                        acc[j, d] += p * vt[t, d]
        for j in range(n):
            result = vector(args[_OUT], (row0 + j // group) * args[_OUT_STRIDE] + (g * group + j % group) * D)
            inverse = np.float32(1) / norm[j]
            for d in range(D):
                result[d] = narrow(acc[j, d] * inverse)

    @cfunc(types.void(types.CPointer(types.int64)))
    def team_member(block):
        args = carray(block, len(FIELDS))
        heads = args[_KV_HEADS]
        requests = args[_ITEMS] // heads
        first = carray(_i64_pointer(args[_FIRST_ROW]), requests)
        rows = carray(_i64_pointer(args[_ROWS]), requests)
        keys = carray(_i64_pointer(args[_KEYS]), requests)
        pool_rows = carray(_i64_pointer(args[_POOL_ROWS]), requests)
        n = 0
        for r in range(requests):
            n = max(n, rows[r])
        n *= args[_GROUP]
        acc, qf = np.empty((n, D), np.float32), np.empty((n, D), np.float32)
        top, norm, s = np.empty(n, np.float32), np.empty(n, np.float32), np.empty(TILE, np.float32)
        kt, vt = np.empty((TILE, D), np.float32), np.empty((TILE, D), np.float32)
        item = _take_next(block)
        while item < args[_ITEMS]:
            r, g = item // heads, item % heads
            slots = carray(_i32_pointer(args[_REQ_TO_TOKEN] + pool_rows[r] * args[_REQ_TO_TOKEN_STRIDE] * 4), keys[r])
            attend(args, r, g, slots, first[r], rows[r], keys[r], acc, top, norm, qf, kt, vt, s)
            item = _take_next(block)

    return team_member
