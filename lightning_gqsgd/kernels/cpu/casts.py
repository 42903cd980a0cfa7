"""Casts that Numba has no function for, as LLVM's own instructions. ``like`` is a number of the type that is wanted."""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic
from numba.np import arrayobj


@intrinsic
def float_of(typing_context, bits, like):
    """The float of the type of ``like`` that has these bits, an int64."""

    def generate(context, builder, signature, arguments):
        integer = context.get_value_type(types.int32 if like == types.float32 else types.int64)
        narrow = builder.trunc(arguments[0], integer) if like == types.float32 else arguments[0]
        return builder.bitcast(narrow, context.get_value_type(signature.return_type))

    return like(types.int64, like), generate


@intrinsic
def narrowed(typing_context, value, like):
    """An int64 as an integer of the type of ``like``: Numba widens all arithmetic to 64 bits."""

    def generate(context, builder, signature, arguments):
        target = context.get_value_type(signature.return_type)
        return builder.trunc(arguments[0], target) if target.width < 64 else arguments[0]

    return like(types.int64, like), generate


@intrinsic
def integer_of(typing_context, value, like):
    """A float, rounded to zero, as an integer of the type of ``like``."""

    def generate(context, builder, signature, arguments):
        return builder.fptosi(arguments[0], context.get_value_type(signature.return_type))

    return like(value, like), generate


@intrinsic
def clamped(typing_context, value, limit):
    """A number, or the nearer end of -limit to limit"""

    def generate(context, builder, signature, arguments):
        value, limit = arguments
        negative = builder.fneg(limit)
        value = builder.select(builder.fcmp_ordered("<", value, negative), negative, value)
        return builder.select(builder.fcmp_ordered(">", value, limit), limit, value)

    return value(value, value), generate


@intrinsic
def larger(typing_context, one, other):
    def generate(context, builder, signature, arguments):
        return builder.select(builder.icmp_signed(">", arguments[0], arguments[1]), arguments[0], arguments[1])

    return one(one, one), generate


@intrinsic
def smaller(typing_context, one, other):
    def generate(context, builder, signature, arguments):
        return builder.select(builder.icmp_signed("<", arguments[0], arguments[1]), arguments[0], arguments[1])

    return one(one, one), generate


@intrinsic
def part(typing_context, array, first, count):
    """The ``count`` numbers of a contiguous array from number ``first`` on, as an array; nothing is checked.

    A slice does the same with a dozen branches, for negative and for large numbers.
    """
    return array(array, types.intp, types.intp), _view


@intrinsic
def numbers(typing_context, memory, first, count, like):
    """``count`` numbers of the type of ``like`` in a contiguous array, from its number ``first`` on; nothing is checked."""
    return types.Array(like, 1, "C")(memory, types.intp, types.intp, like), _view


def _view(context, builder, signature, arguments):
    source = context.make_array(signature.args[0])(context, builder, arguments[0])
    view = context.make_array(signature.return_type)(context, builder)
    itemsize = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(signature.return_type.dtype)))
    arrayobj.populate_array(
        view,
        data=builder.bitcast(builder.gep(source.data, [arguments[1]]), view.data.type),
        shape=[arguments[2]],
        strides=[itemsize],
        itemsize=itemsize,
        meminfo=None,
    )
    return view._getvalue()
