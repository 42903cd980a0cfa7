"""Operations on numbers and arrays for which Numba has no function, as instructions of LLVM.

Numba widens all integer arithmetic to 64 bits, and its slices and comparisons have branches that no kernel needs.

If a function has an argument ``like``, the type of ``like`` is the type of the result, and the value of ``like`` does
not matter.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core.errors import TypingError
from numba.np import arrayobj

from lightning_gqsgd.kernels.cpu.jit import instruction


@instruction(lambda bits, like: like(types.int64, like))
def float_of(code, bits, like):
    """Returns the float with the type of ``like`` and with these bits, which are an int64."""
    narrow = code.trunc(bits, ir.IntType(32)) if code.result == types.float32 else bits
    return code.bitcast(narrow, code.form)


@instruction(lambda value: (types.int32 if value == types.float32 else types.int64)(value))
def bits_of(code, value):
    """Returns the bits of a float, as a signed integer of the same width."""
    return code.bitcast(value, code.form)


@instruction(lambda value, like: like(types.int64, like))
def narrowed(code, value, like):
    """Returns an int64 as an integer of the type of ``like``, without its highest bits."""
    return code.trunc(value, code.form) if code.form.width < 64 else value


@instruction(lambda value, like: like(value, like))
def integer_of(code, value, like):
    """Returns a float, rounded towards zero, as an integer of the type of ``like``."""
    return code.fptosi(value, code.form)


@instruction(lambda value, count: value(value, value))
def shifted_down(code, value, count):
    """Returns an integer shifted to the right by ``count`` bits. ``count`` has the type of the integer."""
    return (code.ashr if code.result.signed else code.lshr)(value, count)


@instruction(lambda value, count: value(value, value))
def shifted_up(code, value, count):
    """Returns an integer shifted to the left by ``count`` bits. ``count`` has the type of the integer."""
    return code.shl(value, count)


@instruction(lambda value, limit: value(value, value))
def clamped(code, value, limit):
    """Returns a float clamped to the range from -limit to limit. NaN stays NaN."""
    negative = code.fneg(limit)
    value = code.select(code.fcmp_ordered("<", value, negative), negative, value)
    return code.select(code.fcmp_ordered(">", value, limit), limit, value)


@instruction(lambda value, sign: value(value, value))
def with_sign_of(code, value, sign):
    """Returns a float with the sign of another float of the same type."""
    kind = code.form
    function = ir.FunctionType(kind, [kind, kind])
    return code.call(code.module.declare_intrinsic("llvm.copysign", [kind], function), [value, sign])


@instruction(lambda left, right: left(left, left))
def larger(code, left, right):
    """Returns the larger of two signed integers of one type."""
    return code.select(code.icmp_signed(">", left, right), left, right)


@instruction(lambda left, right: left(left, left))
def smaller(code, left, right):
    """Returns the smaller of two signed integers of one type."""
    return code.select(code.icmp_signed("<", left, right), left, right)


@instruction(lambda array, index: types.void(array, types.intp))
def fetch(code, array, index):
    """Prefetch the memory around a number of an array, without waiting for it.

    The memory is loaded into the second-level cache. The index may be outside of the array.
    """
    source = code.context.make_array(code.types[0])(code.context, code, array)
    number = code.gep(source.data, [index])
    pointer = ir.IntType(8).as_pointer()
    integer = ir.IntType(32)
    function = ir.FunctionType(ir.VoidType(), [pointer, integer, integer, integer])
    prefetch = code.module.declare_intrinsic("llvm.prefetch", [pointer], function)
    read = integer(0)
    second_level = integer(2)
    data = integer(1)
    code.call(prefetch, [code.bitcast(number, pointer), read, second_level, data])


@instruction(lambda array, first, count: _contiguous(array)(array, types.intp, types.intp))
def part(code, array, first, count):
    """Returns the ``count`` numbers of a contiguous array from number ``first`` on, as an array. Nothing is checked."""
    return _view(code, array, first, count)


@instruction(
    lambda memory, first, count, like: types.Array(like, 1, "C")(_contiguous(memory), types.intp, types.intp, like)
)
def numbers(code, memory, first, count, like):
    """Returns ``count`` numbers of the type of ``like`` in a contiguous array, from its number ``first`` on, as an
    array. Nothing is checked."""
    return _view(code, memory, first, count)


def _contiguous(array):
    """Returns the type of an array.

    Raises:
        TypingError: if the array is not contiguous or has more than one dimension.
    """
    if array.layout != "C" or array.ndim != 1:
        raise TypingError(f"kernels take contiguous arrays of one dimension, not {array}")
    return array


def _view(code, array, first, count):
    """Generate code for an array that is a view of another array."""
    context = code.context
    source = context.make_array(code.types[0])(context, code, array)
    view = context.make_array(code.result)(context, code)
    number = context.get_data_type(code.result.dtype)
    itemsize = context.get_constant(types.intp, context.get_abi_sizeof(number))
    arrayobj.populate_array(
        view,
        data=code.bitcast(code.gep(source.data, [first]), view.data.type),
        shape=[count],
        strides=[itemsize],
        itemsize=itemsize,
        meminfo=None,
    )
    return view._getvalue()
