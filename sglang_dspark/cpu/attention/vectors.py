"""The three inner loops of attention as LLVM vectors: a transposing load, a widening load, a small matrix product.

A loop that LLVM is left to vectorise by itself sums a dot product across lanes once per key, which costs more than the
product. Here keys lie side by side in the lanes, so a score is a chain of multiply-adds in one lane: nothing is summed
across lanes, and what one row gets does not depend on how many rows are computed with it. The vectors are LLVM's own
type, 16 floats: one register with AVX-512, two with AVX, four with NEON. Addresses and strides are int64; scratch is
float32; pool elements are of a *kind* (one of the three below) and are widened to float32 by shifts or one conversion.
"""

from __future__ import annotations

import functools
import itertools

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
FLOAT32, BFLOAT16, FLOAT16 = range(3)
ITEMSIZE = (4, 2, 2)
# A product keeps 4 rows of this many vectors of sums in registers: AVX-512 has 32 of 16 floats, others about half of it.
_COLUMN_VECTORS = 4 if llvmlite.binding.get_host_cpu_features().get("avx512f", False) else 1

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS = ir.VectorType(_F32, LANES)


def _constant(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


def _at(builder, address, offset, element):
    """A pointer to `element` at `address` plus `offset` bytes, an int or an int64 value."""
    offset = _constant(offset) if isinstance(offset, int) else offset
    return builder.inttoptr(builder.add(address, offset), element.as_pointer())


def _shuffle(builder, a, b, mask):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(mask)), list(mask)))


def _splat(builder, value, lanes):
    nothing = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    one = builder.insert_element(nothing, value, ir.Constant(_I32, 0))
    return _shuffle(builder, one, one, [0] * lanes)


def _repeated(element, value, lanes):
    return ir.Constant(ir.VectorType(element, lanes), [value] * lanes)


def _widen(builder, kind, raw, lanes):
    """float32 lanes from a vector of float32 or of 16-bit elements."""
    floats = ir.VectorType(_F32, lanes)
    if kind == FLOAT32:
        return builder.bitcast(raw, floats)
    if kind == FLOAT16:
        return builder.fpext(builder.bitcast(raw, ir.VectorType(ir.HalfType(), lanes)), floats)
    wide = builder.zext(raw, ir.VectorType(_I32, lanes))
    return builder.bitcast(builder.shl(wide, _repeated(_I32, 16, lanes)), floats)


def _narrow(builder, kind, floats, lanes):
    if kind == FLOAT32:
        return floats
    if kind == FLOAT16:
        half = builder.fptrunc(floats, ir.VectorType(ir.HalfType(), lanes))
        return builder.bitcast(half, ir.VectorType(_I16, lanes))
    bits = builder.bitcast(floats, ir.VectorType(_I32, lanes))
    high = builder.lshr(bits, _repeated(_I32, 16, lanes))
    odd = builder.and_(high, _repeated(_I32, 1, lanes))
    rounded = builder.add(bits, builder.add(odd, _repeated(_I32, 0x7FFF, lanes)))
    return builder.trunc(builder.lshr(rounded, _repeated(_I32, 16, lanes)), ir.VectorType(_I16, lanes))


def _words_to_floats(builder, kind, words):
    """The elements of 16 words, first halves then second halves; float32 words are one element each."""
    if kind == FLOAT32:
        return [builder.bitcast(words, _FLOATS)]
    if kind == BFLOAT16:  # the second half is in place already, above zeros once the first is masked
        halves = [builder.shl(words, _repeated(_I32, 16, LANES)), builder.and_(words, _repeated(_I32, -65536, LANES))]
        return [builder.bitcast(half, _FLOATS) for half in halves]
    halves = [words, builder.lshr(words, _repeated(_I32, 16, LANES))]
    return [_widen(builder, kind, builder.trunc(half, ir.VectorType(_I16, LANES)), LANES) for half in halves]


def _transpose_quads(builder, rows):
    """Four vectors of 16 words, one per column, from sixteen rows of four words."""
    pairs = [_shuffle(builder, rows[i], rows[i + 4], range(8)) for i in (0, 1, 2, 3, 8, 9, 10, 11)]
    quads = [_shuffle(builder, pairs[i], pairs[i + 4], range(16)) for i in range(4)]  # lane group g: row 4 g + i

    def merge(a, b, pattern):
        return _shuffle(builder, a, b, [4 * (i // 4) + pattern[i % 4] for i in range(LANES)])

    low, high = (0, 16, 1, 17), (2, 18, 3, 19)
    even, odd = [merge(*quads[:2], p) for p in (low, high)], [merge(*quads[2:], p) for p in (low, high)]
    return [merge(a, b, p) for a, b in zip(even, odd, strict=True) for p in ((0, 1, 16, 17), (2, 3, 18, 19))]


@intrinsic(prefer_literal=True)
def load_transposed(typingctx, rows, offset, out, stride, kind, size):
    """Write ``out[d * stride + t]`` for d < size and t < 16 from 16 rows, `offset` bytes behind ``rows[0..15]``."""
    kind_value, size_value = kind.literal_value, size.literal_value
    itemsize = ITEMSIZE[kind_value]
    per_quad = 16 // itemsize

    def codegen(context, builder, signature, args):
        rows, offset, out, stride = args[:4]
        bases = [builder.add(offset, builder.load(_at(builder, rows, 8 * t, _I64))) for t in range(LANES)]
        row_bytes = builder.mul(stride, _constant(4))

        def store(d, floats):
            builder.store(floats, _at(builder, out, builder.mul(row_bytes, _constant(d)), _FLOATS), align=4)

        whole = size_value - size_value % per_quad
        for d in range(0, whole, per_quad):
            quad = ir.VectorType(_I32, 4)
            loaded = [builder.load(_at(builder, base, d * itemsize, quad), align=itemsize) for base in bases]
            columns = [_words_to_floats(builder, kind_value, words) for words in _transpose_quads(builder, loaded)]
            for i, floats in enumerate(itertools.chain(*columns)):
                store(d + i, floats)
        for d in range(whole, size_value):  # a head size that is no multiple of 16 bytes
            floats = ir.Constant(_FLOATS, ir.Undefined)
            for t, base in enumerate(bases):
                one = builder.extract_element(_load_widened(builder, kind_value, base, d, 1), ir.Constant(_I32, 0))
                floats = builder.insert_element(floats, one, ir.Constant(_I32, t))
            store(d, floats)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, kind, size), codegen


def _pieces(size):
    """(first element, lanes) of the vectors that cover `size` elements: whole ones, then halves, down to one element."""
    done = 0
    for lanes in (16, 8, 4, 2, 1):
        while size - done >= lanes:
            yield done, lanes
            done += lanes


def _load_widened(builder, kind, base, index, lanes):
    element = _F32 if kind == FLOAT32 else _I16
    pointer = _at(builder, base, index * ITEMSIZE[kind], ir.VectorType(element, lanes))
    return _widen(builder, kind, builder.load(pointer, align=ITEMSIZE[kind]), lanes)


@intrinsic(prefer_literal=True)
def load_widened(typingctx, row, out, kind, size):
    """Write the `size` elements at the address `row` to `out` as float32."""
    kind_value, size_value = kind.literal_value, size.literal_value

    def codegen(context, builder, signature, args):
        for first, lanes in _pieces(size_value):
            floats = _load_widened(builder, kind_value, args[0], first, lanes)
            builder.store(floats, _at(builder, args[1], 4 * first, floats.type), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, kind, size), codegen


@intrinsic(prefer_literal=True)
def store_narrowed(typingctx, values, row, kind, size):
    """Write `size` float32 at `values` to the address `row` as elements of the pool's kind, rounded to nearest even."""
    kind_value, size_value = kind.literal_value, size.literal_value

    def codegen(context, builder, signature, args):
        for first, lanes in _pieces(size_value):
            floats = _load_widened(builder, FLOAT32, args[0], first, lanes)
            narrow = _narrow(builder, kind_value, floats, lanes)
            pointer = _at(builder, args[1], ITEMSIZE[kind_value] * first, narrow.type)
            builder.store(narrow, pointer, align=ITEMSIZE[kind_value])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, kind, size), codegen


def _reduction(combine):
    """Of `count` float32 at an address, a multiple of 16: by whole vectors, then by halves of the last one."""

    @intrinsic(prefer_literal=True)
    def reduce(typingctx, values, count):
        def codegen(context, builder, signature, args):
            parts = [_load_widened(builder, FLOAT32, args[0], i, LANES) for i in range(0, count.literal_value, LANES)]
            total = functools.reduce(functools.partial(combine, builder), parts)
            lanes = LANES
            while lanes > 1:
                lanes //= 2
                low, high = (_shuffle(builder, total, total, range(i, i + lanes)) for i in (0, lanes))
                total = combine(builder, low, high)
            return builder.extract_element(total, ir.Constant(_I32, 0))

        return types.float32(types.int64, count), codegen

    return reduce


largest = _reduction(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))
total = _reduction(lambda builder, a, b: builder.fadd(a, b))


@intrinsic(prefer_literal=True)
def prefetch(typingctx, row, kind, size):
    """Ask for the cache lines of the `size` elements at the address `row`."""
    row_bytes = size.literal_value * ITEMSIZE[kind.literal_value]

    def codegen(context, builder, signature, args):
        byte = ir.IntType(8).as_pointer()
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32]), "llvm.prefetch.p0"
        )
        flags = [ir.Constant(_I32, value) for value in (0, 3, 1)]  # to read, to keep, data
        for offset in range(0, row_bytes, 64):
            builder.call(function, [_at(builder, args[0], offset, ir.IntType(8)), *flags])
        return context.get_dummy_value()

    return types.void(types.int64, kind, size), codegen


@intrinsic(prefer_literal=True)
def multiply(typingctx, a, b, c, keep, rows, depth, columns, accumulate):
    """``c = a @ b``, or with `accumulate` ``c[r] = keep[r] * c[r] + a[r] @ b``, all dense.

    a ``[rows, depth]``, b ``[depth, columns]``, c ``[rows, columns]``, keep ``[rows]``; `columns` a multiple of 16.
    Every element is one chain of multiply-adds over the depth.
    """
    m, n, k_count = rows.literal_value, columns.literal_value, depth.literal_value
    accumulates = accumulate.literal_value

    def codegen(context, builder, signature, args):
        a, b, c, keep = args[:4]
        fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), f"llvm.fmuladd.v{LANES}f32"
        )
        a_rows = [builder.add(a, _constant(4 * r * k_count)) for r in range(m)]
        vectors = n // LANES
        for first in range(0, vectors, _COLUMN_VECTORS):
            block = range(first, min(vectors, first + _COLUMN_VECTORS))
            places = {(r, v): _at(builder, c, 4 * (r * n + v * LANES), _FLOATS) for r in range(m) for v in block}
            sums = {}
            for place, pointer in places.items():
                start = _repeated(_F32, 0.0, LANES)
                if accumulates:
                    factor = _splat(builder, builder.load(_at(builder, keep, 4 * place[0], _F32)), LANES)
                    start = builder.fmul(factor, builder.load(pointer, align=4))
                sums[place] = cgutils.alloca_once_value(builder, start)
            with cgutils.for_range(builder, _constant(k_count)) as loop:
                row = builder.mul(loop.index, _constant(4 * n))
                b_k = [builder.load(_at(builder, builder.add(b, row), 4 * v * LANES, _FLOATS), align=4) for v in block]
                for r in range(m):
                    a_k = builder.load(_at(builder, a_rows[r], builder.mul(loop.index, _constant(4)), _F32))
                    factor = _splat(builder, a_k, LANES)
                    for v, values in zip(block, b_k, strict=True):
                        builder.store(builder.call(fma, [factor, values, builder.load(sums[r, v])]), sums[r, v])
            for place, pointer in places.items():
                builder.store(builder.load(sums[place]), pointer, align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, rows, depth, columns, accumulate), codegen
