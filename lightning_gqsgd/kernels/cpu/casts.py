"""Operations on numbers and arrays for which Numba has no function, as instructions of LLVM.

Numba widens all integer arithmetic to 64 bits, and its slices and comparisons have branches that no kernel needs.

If a function has an argument ``like``, the type of ``like`` is the type of the result, and the value of ``like`` does
not matter.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core.errors import TypingError
from numba.extending import intrinsic
from numba.np import arrayobj


@intrinsic
def float_of(typing_context, bits, like):
    """Returns the float with the type of ``like`` and with these bits, which are an int64."""

    def generate(context, builder, signature, arguments):
        integer = context.get_value_type(types.int32 if like == types.float32 else types.int64)
        narrow = builder.trunc(arguments[0], integer) if like == types.float32 else arguments[0]
        return builder.bitcast(narrow, context.get_value_type(signature.return_type))

    return like(types.int64, like), generate


@intrinsic
def bits_of(typing_context, value):
    """Returns the bits of a float, as a signed integer of the same width."""
    integer = types.int32 if value == types.float32 else types.int64

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

    return integer(value), generate


@intrinsic
def narrowed(typing_context, value, like):
    """Returns an int64 as an integer of the type of ``like``, without its highest bits."""

    def generate(context, builder, signature, arguments):
        target = context.get_value_type(signature.return_type)
        return builder.trunc(arguments[0], target) if target.width < 64 else arguments[0]

    return like(types.int64, like), generate


@intrinsic
def integer_of(typing_context, value, like):
    """Returns a float, rounded towards zero, as an integer of the type of ``like``."""

    def generate(context, builder, signature, arguments):
        return builder.fptosi(arguments[0], context.get_value_type(signature.return_type))

    return like(value, like), generate


@intrinsic
def shifted_down(typing_context, value, count):
    """Returns an integer shifted to the right by ``count`` bits. ``count`` has the type of the integer."""

    def generate(context, builder, signature, arguments):
        return (builder.ashr if value.signed else builder.lshr)(*arguments)

    return value(value, value), generate


@intrinsic
def shifted_up(typing_context, value, count):
    """Returns an integer shifted to the left by ``count`` bits. ``count`` has the type of the integer."""

    def generate(context, builder, signature, arguments):
        return builder.shl(arguments[0], arguments[1])

    return value(value, value), generate


@intrinsic
def clamped(typing_context, value, limit):
    """Returns a float clamped to the range from -limit to limit. NaN stays NaN."""

    def generate(context, builder, signature, arguments):
        value, limit = arguments
        negative = builder.fneg(limit)
        value = builder.select(builder.fcmp_ordered("<", value, negative), negative, value)
        return builder.select(builder.fcmp_ordered(">", value, limit), limit, value)

    return value(value, value), generate


@intrinsic
def with_sign_of(typing_context, value, sign):
    """Returns a float with the sign of another float of the same type."""

    def generate(context, builder, signature, arguments):
        kind = context.get_value_type(signature.return_type)
        function = ir.FunctionType(kind, [kind, kind])
        return builder.call(builder.module.declare_intrinsic("llvm.copysign", [kind], function), arguments)

    return value(value, value), generate


@intrinsic
def larger(typing_context, left, right):
    """Returns the larger of two signed integers of one type."""

    def generate(context, builder, signature, arguments):
        return builder.select(builder.icmp_signed(">", *arguments), *arguments)

    return left(left, left), generate


@intrinsic
def smaller(typing_context, left, right):
    """Returns the smaller of two signed integers of one type."""

    def generate(context, builder, signature, arguments):
        return builder.select(builder.icmp_signed("<", *arguments), *arguments)

    return left(left, left), generate


@intrinsic
def fetch(typing_context, array, index):
    """Prefetch the memory around a number of an array, without waiting for it.

    The memory is loaded into the second-level cache. The index may be outside of the array.
    """

    def generate(context, builder, signature, arguments):
        source = context.make_array(signature.args[0])(context, builder, arguments[0])
        number = builder.gep(source.data, [arguments[1]])
        pointer = ir.IntType(8).as_pointer()
        integer = ir.IntType(32)
        function = ir.FunctionType(ir.VoidType(), [pointer, integer, integer, integer])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], function)
        read = integer(0)
        second_level = integer(2)
        data = integer(1)
        builder.call(prefetch, [builder.bitcast(number, pointer), read, second_level, data])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@intrinsic
def part(typing_context, array, first, count):
    """Returns the ``count`` numbers of a contiguous array from number ``first`` on, as an array. Nothing is checked."""
    _check_contiguous(array)
    return array(array, types.intp, types.intp), _view


@intrinsic
def numbers(typing_context, memory, first, count, like):
    """Returns ``count`` numbers of the type of ``like`` in a contiguous array, from its number ``first`` on, as an
    array. Nothing is checked."""
    _check_contiguous(memory)
    return types.Array(like, 1, "C")(memory, types.intp, types.intp, like), _view


def _check_contiguous(array):
    """Raise TypingError if an array is not contiguous or has more than one dimension."""
    if array.layout != "C" or array.ndim != 1:
        raise TypingError(f"kernels take contiguous arrays of one dimension, not {array}")


def _view(context, builder, signature, arguments):
    """Generate code for an array that is a view of another array."""
    source = context.make_array(signature.args[0])(context, builder, arguments[0])
    view = context.make_array(signature.return_type)(context, builder)
    number = context.get_data_type(signature.return_type.dtype)
    itemsize = context.get_constant(types.intp, context.get_abi_sizeof(number))
    first = builder.gep(source.data, [arguments[1]])
    arrayobj.populate_array(
        view,
        data=builder.bitcast(first, view.data.type),
        shape=[arguments[2]],
        strides=[itemsize],
        itemsize=itemsize,
        meminfo=None,
    )
    return view._getvalue()
