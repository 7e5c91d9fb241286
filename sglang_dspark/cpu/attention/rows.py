"""RMSNorm, rotary embedding and gated activation of a plain CPU as one compiled call each, in place of many of torch.

At a few rows an operation's own cost is all there is: 61 norms and 30 rotations were about 900 operations of a step. Without
these a plain step takes 9.6 ± 0.6 % longer with one client and 8.3 ± 0.8 % with 32 (benchmarks/results/toggles.md).
All compute in float32 and round once, and a row's bits do not depend on the rows beside it (torch's activations end a
thread's share with other code than they begin it with, and the share ends in the middle of a row).
"""

from __future__ import annotations

import ctypes
import functools

import numba
import numpy as np
import torch
from numba import carray, cfunc, types

from sglang_dspark.cpu.attention.addresses import address, i64_as_f64, i64_pointer
from sglang_dspark.cpu.attention.kernel import KINDS, LOG2_E, _exp2, digest_of_parts
from sglang_dspark.cpu.attention.vectors import ITEMSIZE, LANES, load_widened, store_narrowed, total

_NORM_FIELDS, _ROTATION_FIELDS, _GATE_FIELDS = 10, 13, 7
# An activation is x sigmoid(a x + b x^3): these a and b make SiLU, and GELU in its tanh form.
SILU, GELU_TANH = (1.0, 0.0), (1.5957691216057308, 0.07135481282722423)
_SIGNATURE = types.void(types.CPointer(types.int64))
_CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@numba.njit(inline="always")
def _load_row(source, target, size, kind):
    """`size` elements, known at run time only, to float32."""
    whole = size // LANES * LANES
    for i in range(0, whole, LANES):
        load_widened(source + i * ITEMSIZE[kind], target + 4 * i, kind, LANES)
    for i in range(whole, size):
        load_widened(source + i * ITEMSIZE[kind], target + 4 * i, kind, 1)


@numba.njit(inline="always")
def _store_row(source, target, size, kind):
    whole = size // LANES * LANES
    for i in range(0, whole, LANES):
        store_narrowed(source + 4 * i, target + i * ITEMSIZE[kind], kind, LANES)
    for i in range(whole, size):
        store_narrowed(source + 4 * i, target + i * ITEMSIZE[kind], kind, 1)


def _compile_norm(kind: int, version: int):
    @cfunc(_SIGNATURE, cache=True, error_model="numpy", nogil=True)
    def norm(block):
        _ = version  # a cell of this closure is a part of numba's cache key
        args = carray(block, _NORM_FIELDS)
        x, x_stride, residual, residual_stride, summed, weight, out, rows, size, eps = args[:10]
        padded = (size + LANES - 1) // LANES * LANES
        row, other, scale = np.zeros(padded, np.float32), np.zeros(padded, np.float32), np.zeros(padded, np.float32)
        squares = np.empty(LANES, np.float32)
        _load_row(weight, address(scale), size, kind)
        for r in range(rows):
            _load_row(x + r * x_stride * ITEMSIZE[kind], address(row), size, kind)
            if residual != 0:
                _load_row(residual + r * residual_stride * ITEMSIZE[kind], address(other), size, kind)
                for i in range(padded):
                    row[i] += other[i]
                _store_row(address(row), summed + r * size * ITEMSIZE[kind], size, kind)
            squares[:] = 0
            for i in range(0, padded, LANES):
                for lane in range(LANES):
                    squares[lane] += row[i + lane] * row[i + lane]
            mean = total(address(squares), LANES) / np.float32(size)
            factor = np.float32(1) / np.sqrt(mean + np.float32(i64_as_f64(eps)))
            for i in range(padded):
                row[i] = row[i] * factor * scale[i]
            _store_row(address(row), out + r * size * ITEMSIZE[kind], size, kind)

    return norm


def _compile_rotation(kind: int, table_kind: int, version: int):
    @cfunc(_SIGNATURE, cache=True, error_model="numpy", nogil=True)
    def rotate(block):
        _ = version
        args = carray(block, _ROTATION_FIELDS)
        table, positions, rows, size, half, table_rows, query, out, query_stride, q_heads = args[:10]
        key, key_stride, k_heads = args[10:13]
        head, turned = np.empty(size, np.float32), np.empty(size, np.float32)
        angles = np.empty(2 * half, np.float32)  # cosines, then sines
        for r in range(rows):
            position = carray(i64_pointer(positions), rows)[r]
            if position < 0 or position >= table_rows:
                args[2] = -1
                return
            _load_row(table + position * 2 * half * ITEMSIZE[table_kind], address(angles), 2 * half, table_kind)
            source, target = query + r * query_stride * ITEMSIZE[kind], out + r * q_heads * size * ITEMSIZE[kind]
            for h in range(q_heads + k_heads):
                if h == q_heads:
                    source = key + r * key_stride * ITEMSIZE[kind]
                    target = out + (rows * q_heads + r * k_heads) * size * ITEMSIZE[kind]
                _load_row(source, address(head), size, kind)
                for i in range(half):
                    turned[i] = head[i] * angles[i] - head[half + i] * angles[half + i]
                    turned[half + i] = head[half + i] * angles[i] + head[i] * angles[half + i]
                for i in range(2 * half, size):
                    turned[i] = head[i]
                _store_row(address(turned), target, size, kind)
                source += size * ITEMSIZE[kind]
                target += size * ITEMSIZE[kind]

    return rotate


def _compile_gate(kind: int, version: int):
    @cfunc(_SIGNATURE, cache=True, error_model="numpy", nogil=True)
    def gate(block):
        _ = version
        args = carray(block, _GATE_FIELDS)
        x, x_stride, out, rows, size = args[:5]
        linear, cubic = np.float32(i64_as_f64(args[5])), np.float32(i64_as_f64(args[6]))
        padded = (size + LANES - 1) // LANES * LANES
        row, up = np.zeros(padded, np.float32), np.zeros(padded, np.float32)
        for r in range(rows):
            source = x + r * x_stride * ITEMSIZE[kind]
            _load_row(source, address(row), size, kind)
            _load_row(source + size * ITEMSIZE[kind], address(up), size, kind)
            for i in range(padded):
                v = row[i]
                z = v * (linear + cubic * v * v)
                power = -abs(z) * np.float32(LOG2_E)
                small = np.float32(0) if power < np.float32(-126) else _exp2(power)
                row[i] = v * up[i] * (np.float32(1) if z >= 0 else small) / (np.float32(1) + small)
            _store_row(address(row), out + r * size * ITEMSIZE[kind], size, kind)

    return gate


@functools.cache
def _norm_kernel(dtype: torch.dtype):
    return _CALL(_compile_norm(KINDS[dtype], digest_of_parts()).address)


@functools.cache
def _rotation_kernel(dtype: torch.dtype, table_dtype: torch.dtype):
    return _CALL(_compile_rotation(KINDS[dtype], KINDS[table_dtype], digest_of_parts()).address)


@functools.cache
def _gate_kernel(dtype: torch.dtype):
    return _CALL(_compile_gate(KINDS[dtype], digest_of_parts()).address)


def _call(kernel, fields: tuple) -> np.ndarray:
    block = np.array(fields, np.int64)
    kernel(block.ctypes.data)
    return block


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None):
    """RMSNorm over the last dimension, of x or of x + residual.

    Args:
        x, residual: ``[rows, size]`` of one dtype, elements of a row side by side; weight: ``[size]``, the same dtype.

    Returns: the normalised rows, and with `residual` the pair of them and of x + residual, rounded.
    """
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype)
    summed = None if residual is None else torch.empty_like(out)
    added = (0, 0, 0) if residual is None else (residual.data_ptr(), residual.stride(0), summed.data_ptr())
    bits = np.float64(eps).view(np.int64)
    fields = (x.data_ptr(), x.stride(0), *added, weight.data_ptr(), out.data_ptr(), rows, size, bits)
    _call(_norm_kernel(x.dtype), fields)
    return out if residual is None else (out, summed)


def rotate(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, table: torch.Tensor, head_size: int):
    """Rotary embedding in halves (NeoX) of all heads of q and k.

    Args:
        positions: int64 ``[rows]``; query, key: ``[rows, heads * head size]``, elements of a row side by side.
        table: cosines then sines of each position, ``[positions, rotary size]``.

    Raises:
        IndexError: a position outside the table.
    """
    rows, q_heads, k_heads = len(positions), query.shape[1] // head_size, key.shape[1] // head_size
    out = torch.empty(rows * (q_heads + k_heads) * head_size, dtype=query.dtype)
    block = _call(_rotation_kernel(query.dtype, table.dtype), (
        table.data_ptr(), positions.data_ptr(), rows, head_size, table.shape[1] // 2, table.shape[0], query.data_ptr(),
        out.data_ptr(), query.stride(0), q_heads, key.data_ptr(), key.stride(0), k_heads,
    ))  # fmt: skip
    if block[2] != rows:
        raise IndexError(f"a position of {positions.tolist()} is outside the rotary table's {table.shape[0]} rows")
    q, k = out.split([rows * q_heads * head_size, rows * k_heads * head_size])
    return q.view(rows, -1), k.view(rows, -1)


def gate(x: torch.Tensor, activation: tuple[float, float]) -> torch.Tensor:
    """The first half of each row, activated, times the second half: ``[rows, 2 * size]`` to ``[rows, size]``.

    Args:
        x: elements of a row side by side; activation: `SILU` or `GELU_TANH`.
    """
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, size), dtype=x.dtype)
    factors = np.array(activation, np.float64).view(np.int64)
    _call(_gate_kernel(x.dtype), (x.data_ptr(), x.stride(0), out.data_ptr(), rows, size, *factors))
    return out
