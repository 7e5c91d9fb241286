"""Plain addresses in numba: pointers from integers, the bits of one number as another, an atomic counter."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def _bitcast(source, target, llvm_type):
    @intrinsic
    def cast(typingctx, value):
        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], llvm_type)

        return target(source), codegen

    return cast


u32_as_f32 = _bitcast(types.uint32, types.float32, ir.FloatType())
i64_as_f64 = _bitcast(types.int64, types.float64, ir.DoubleType())


def _pointer_to(element):
    @intrinsic
    def cast(typingctx, address):
        pointer = types.CPointer(element)

        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(pointer))

        return pointer(types.int64), codegen

    return cast


i64_pointer, i32_pointer = _pointer_to(types.int64), _pointer_to(types.int32)


@intrinsic
def address(typingctx, array):
    """Where an array's first element is, int64 (`array.ctypes.data` is the same and takes long to compile)."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, ir.IntType(64))

    return types.int64(array), codegen


@intrinsic
def take_next(typingctx, counter):
    """Add one to the int64 behind the pointer, atomically, and return what it was."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", args[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.CPointer(types.int64)), codegen
