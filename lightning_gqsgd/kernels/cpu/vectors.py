"""Vectors of numbers, for loops that LLVM does not vectorise by itself.

Before a vectorised loop over arrays, LLVM's code checks that the arrays do not overlap. This takes longer than a loop
over a short block. LLVM also does not find the pattern of a butterfly. A vector here has 64 bytes of coordinates, which
are 16 fp32 or 8 fp64 numbers. Vectors of integers or truth values that belong to coordinates have as many numbers. If
the processor has shorter vectors, LLVM splits them. `+`, `-` and `*` work on two vectors of floats.

Nothing is checked: a vector that is loaded or stored has to be within its array.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.extending import register_model
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic

#: Number of bytes of a vector of coordinates.
VECTOR_BYTES = 64

_LANE = ir.IntType(32)


class Vector(types.Type):
    """The type of a vector.

    Attributes:
        dtype: the type of its numbers; `types.boolean` for the result of a comparison.
        lanes: the number of its numbers.
    """

    def __init__(self, dtype: types.Type, lanes: int) -> None:
        super().__init__(name=f"Vector({dtype}, {lanes})")
        self.dtype = dtype
        self.lanes = lanes


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    """The type of a vector in LLVM."""

    def __init__(self, manager: Any, vector: Vector) -> None:
        number = ir.IntType(1) if vector.dtype == types.boolean else manager.lookup(vector.dtype).get_data_type()
        super().__init__(manager, vector, ir.VectorType(number, vector.lanes))


def lanes_of(dtype: Any) -> int:
    """Returns the number of coordinates of a dtype in one vector."""
    return int(VECTOR_BYTES * 8 // dtype.bitwidth)


@intrinsic
def lanes(typing_context, array):
    """Returns the number of coordinates of an array that fit in one vector."""

    def generate(context, builder, signature, arguments):
        return context.get_constant(types.intp, lanes_of(signature.args[0].dtype))

    return types.intp(array), generate


@intrinsic
def load(typing_context, array, first):
    """Returns the vector of the coordinates of an array from number ``first`` on."""
    vector = Vector(array.dtype, lanes_of(array.dtype))
    return vector(array, types.intp), _load


@intrinsic
def load_like(typing_context, array, first, like):
    """Returns a vector with as many numbers as the vector ``like``, from number ``first`` of an array on."""
    vector = Vector(array.dtype, like.lanes)
    return vector(array, types.intp, like), _load


@intrinsic
def load_codes(typing_context, array, first, like):
    """Returns a vector of unsigned bytes like `load_like`, converted to signed 32-bit integers."""

    def generate(context, builder, signature, arguments):
        return builder.zext(_load(context, builder, signature, arguments), _form(context, signature.return_type))

    return Vector(types.int32, like.lanes)(array, types.intp, like), generate


@intrinsic
def store(typing_context, array, first, vector):
    """Write a vector into an array, from its number ``first`` on. Integers are truncated to the width of the array's
    numbers."""

    def generate(context, builder, signature, arguments):
        array, first, vector = arguments
        target = ir.VectorType(context.get_data_type(signature.args[0].dtype), signature.args[2].lanes)
        vector = builder.trunc(vector, target) if vector.type != target else vector
        builder.store(vector, *_place(context, builder, signature.args[0], array, first, target))
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), generate


@intrinsic
def filled(typing_context, number, like):
    """Returns a vector of floats that all equal ``number``, with as many numbers as the vector ``like``."""

    def generate(context, builder, signature, arguments):
        return filled_with(builder, arguments[0], _form(context, signature.return_type))

    return Vector(number, like.lanes)(number, like), generate


@intrinsic
def filled_codes(typing_context, number, like):
    """Returns a vector of 32-bit integers that all equal ``number``, with as many numbers as the vector ``like``."""

    def generate(context, builder, signature, arguments):
        form = _form(context, signature.return_type)
        return filled_with(builder, builder.trunc(arguments[0], form.element), form)

    return Vector(types.int32, like.lanes)(types.int64, like), generate


@intrinsic
def butterflies(typing_context, vector):
    """Returns a vector after butterflies of the distances 1, 2, 4, ... within the vector, one after the other.

    A butterfly replaces the left number of a pair by the sum, and the right number by the difference. Both are computed
    as the other number of the pair, plus the number times 1 or -1. This product is exact.
    """

    def generate(context, builder, signature, arguments):
        (vector,) = arguments
        distance = 1
        while distance < vector.type.count:
            others = shuffled(builder, vector, [lane ^ distance for lane in range(vector.type.count)])
            signs = [-1.0 if lane & distance else 1.0 for lane in range(vector.type.count)]
            vector = _called(builder, "llvm.fmuladd", vector, ir.Constant(vector.type, signs), others)
            distance *= 2
        return vector

    return vector(vector), generate


@intrinsic
def folded(typing_context, vector):
    """Returns the sum of a vector. Its second half is added to its first half until one number is left."""

    def generate(context, builder, signature, arguments):
        (vector,) = arguments
        while vector.type.count > 1:
            half = vector.type.count // 2
            first, second = (shuffled(builder, vector, range(start, start + half)) for start in (0, half))
            vector = builder.fadd(first, second)
        return builder.extract_element(vector, _LANE(0))

    return vector.dtype(vector), generate


@intrinsic
def flipped(typing_context, vector, words, shift):
    """Returns a vector of floats, each negated if a bit of its 32-bit integer is 0.

    Args:
        vector: the floats.
        words: as many integers.
        shift: the shift that moves this bit up to the highest bit.
    """

    def generate(context, builder, signature, arguments):
        return _with_signs(context, builder, signature, *arguments, builder.not_)

    return vector(vector, words, types.int64), generate


@intrinsic
def negated_by(typing_context, vector, codes, shift):
    """Returns a vector of floats, each negated if a bit of its 32-bit integer is 1. The arguments are like those of
    `flipped`."""

    def generate(context, builder, signature, arguments):
        return _with_signs(context, builder, signature, *arguments, lambda bits: bits)

    return vector(vector, codes, types.int64), generate


@intrinsic
def magnitudes_of(typing_context, vector):
    """Returns a vector of floats without their signs."""

    def generate(context, builder, signature, arguments):
        return _called(builder, "llvm.fabs", *arguments)

    return vector(vector), generate


@intrinsic
def are_at_least(typing_context, left, right):
    """Returns whether each float of ``left`` is at least as large as the float of ``right``."""

    def generate(context, builder, signature, arguments):
        return builder.fcmp_ordered(">=", *arguments)

    return Vector(types.boolean, left.lanes)(left, right), generate


@intrinsic
def are_negative(typing_context, vector):
    """Returns whether each float is below zero. -0 is not below zero."""

    def generate(context, builder, signature, arguments):
        return builder.fcmp_ordered("<", arguments[0], ir.Constant(arguments[0].type, [0.0] * arguments[0].type.count))

    return Vector(types.boolean, vector.lanes)(vector), generate


@intrinsic
def chosen(typing_context, condition, yes, no):
    """Returns the number of ``yes`` at places where ``condition`` is true, and the number of ``no`` at other places."""

    def generate(context, builder, signature, arguments):
        return builder.select(*arguments)

    return yes(condition, yes, no), generate


@intrinsic
def negated_where(typing_context, condition, vector):
    """Returns a vector of floats, negated at places where ``condition`` is true."""

    def generate(context, builder, signature, arguments):
        condition, vector = arguments
        return builder.select(condition, builder.fneg(vector), vector)

    return vector(condition, vector), generate


@intrinsic
def code_of(typing_context, condition, value):
    """Returns a vector of 32-bit integers: ``value`` at places where ``condition`` is true, and 0 at other places."""

    def generate(context, builder, signature, arguments):
        form = _form(context, signature.return_type)
        value = filled_with(builder, builder.trunc(arguments[1], form.element), form)
        return builder.select(arguments[0], value, ir.Constant(form, [0] * form.count))

    return Vector(types.int32, condition.lanes)(condition, types.int64), generate


@intrinsic
def has_bit(typing_context, vector, place):
    """Returns whether the bit with the value 2^``place`` is set in each integer."""

    def generate(context, builder, signature, arguments):
        vector, place = arguments
        element = vector.type.element
        bit = builder.shl(element(1), builder.trunc(place, element))
        bits = builder.and_(vector, filled_with(builder, bit, vector.type))
        return builder.icmp_unsigned("!=", bits, ir.Constant(vector.type, [0] * vector.type.count))

    return Vector(types.boolean, vector.lanes)(vector, types.int64), generate


@intrinsic
def shifted_down(typing_context, vector, count):
    """Returns a vector of non-negative integers shifted down by ``count`` bits."""

    def generate(context, builder, signature, arguments):
        vector, count = arguments
        return builder.lshr(vector, filled_with(builder, builder.trunc(count, vector.type.element), vector.type))

    return vector(vector, types.int64), generate


@intrinsic
def entry(typing_context, table, place):
    """Returns a vector whose numbers all equal the number at ``place`` of ``table``."""

    def generate(context, builder, signature, arguments):
        table, place = arguments
        return filled_with(builder, builder.extract_element(table, builder.trunc(place, _LANE)), table.type)

    return table(table, types.int64), generate


@intrinsic
def one_of_eight(typing_context, places, table):
    """Returns numbers from a table of eight floats. The three lowest bits of 32-bit integers are the index.

    Args:
        places: the integers, as many as a vector of floats has numbers.
        table: a vector whose first eight numbers are the table. If it has more numbers, it repeats the table.
    """

    def generate(context, builder, signature, arguments):
        places, table = arguments
        features = features_of(context)
        single = signature.args[1].dtype == types.float32
        if single and "+avx512f" in features:
            return permuted(builder, "llvm.x86.avx512.permvar.sf.512", table, places)
        if not single and "+avx512f" in features:
            wide = builder.zext(places, ir.VectorType(ir.IntType(64), places.type.count))
            return permuted(builder, "llvm.x86.avx512.permvar.df.512", table, wide)
        if single and "+avx2" in features:
            eight = shuffled(builder, table, range(8))
            halves = [shuffled(builder, places, range(first, first + 8)) for first in (0, 8)]
            low, high = (permuted(builder, "llvm.x86.avx2.permps", eight, half) for half in halves)
            return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_LANE, 16), list(range(16))))
        numbers = [shuffled(builder, table, [place] * table.type.count) for place in range(8)]
        for bit in range(3):
            has_bit = builder.trunc(builder.lshr(places, places.type([bit] * places.type.count)), _truths(places.type))
            numbers = [builder.select(has_bit, *pair) for pair in zip(numbers[1::2], numbers[::2], strict=True)]
        return numbers[0]

    return table(places, table), generate


@intrinsic
def shifted_up(typing_context, vector, count):
    """Returns a vector of integers shifted up by ``count`` bits."""

    def generate(context, builder, signature, arguments):
        vector, count = arguments
        return builder.shl(vector, filled_with(builder, builder.trunc(count, vector.type.element), vector.type))

    return vector(vector, types.int64), generate


@intrinsic
def either(typing_context, left, right):
    """Returns the bitwise or of two vectors of integers."""

    def generate(context, builder, signature, arguments):
        return builder.or_(*arguments)

    return left(left, right), generate


@intrinsic
def both(typing_context, left, right):
    """Returns the bitwise and of two vectors of integers."""

    def generate(context, builder, signature, arguments):
        return builder.and_(*arguments)

    return left(left, right), generate


@intrinsic
def clamped(typing_context, vector, limit):
    """Returns a vector of floats, each clamped to the range from -limit to limit. NaN stays NaN."""

    def generate(context, builder, signature, arguments):
        vector, limit = arguments
        highest = filled_with(builder, limit, vector.type)
        lowest = builder.fneg(highest)
        vector = builder.select(builder.fcmp_ordered("<", vector, lowest), lowest, vector)
        return builder.select(builder.fcmp_ordered(">", vector, highest), highest, vector)

    return vector(vector, vector.dtype), generate


def features_of(context: Any) -> list[str]:
    """Returns the instruction sets for which code is generated, in LLVM's spelling; empty if they are not known."""
    _, _, features = context.codegen().magic_tuple()
    return features.split(",")


def permuted(builder, name, table, places):
    """Generate one instruction, ``name``, that looks up numbers of a table at places."""
    function = ir.FunctionType(table.type, [table.type, places.type])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), [table, places])


def _truths(form):
    """Returns LLVM's type of a vector of truth values, with as many numbers as ``form``."""
    return ir.VectorType(ir.IntType(1), form.count)


def _with_signs(context, builder, signature, vector, words, shift, signs_of):
    """Generate code that flips signs of a vector. ``signs_of`` generates integers whose highest bit is 1 for a flip."""
    integer = context.get_data_type(types.int32 if signature.args[0].dtype == types.float32 else types.int64)
    form = ir.VectorType(integer, vector.type.count)
    words = builder.zext(words, form) if words.type != form else words
    shift = builder.add(shift, shift.type(integer.width - 32))
    shift = builder.trunc(shift, integer) if integer.width < 64 else shift
    bits = signs_of(builder.shl(words, filled_with(builder, shift, form)))
    highest = ir.Constant(form, [-(1 << (integer.width - 1))] * form.count)
    changed = builder.xor(builder.bitcast(vector, form), builder.and_(bits, highest))
    return builder.bitcast(changed, vector.type)


def _arithmetic(operation: Any, instruction: str) -> None:
    """Register an operator of Python for two vectors of floats."""

    @infer_global(operation)
    class _Template(AbstractTemplate):
        def generic(self, args: Sequence[types.Type], kws: Any) -> Any:
            left, *_ = args
            return signature(left, *args) if isinstance(left, Vector) and tuple(args) == (left, left) else None

    @lower_builtin(operation, Vector, Vector)
    def _generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return getattr(builder, instruction)(*arguments)


_arithmetic(operator.add, "fadd")
_arithmetic(operator.sub, "fsub")
_arithmetic(operator.mul, "fmul")


def _load(context, builder, signature, arguments):
    """Generate code that loads a vector from an array."""
    array = signature.args[0]
    form = ir.VectorType(context.get_data_type(array.dtype), signature.return_type.lanes)
    pointer, alignment = _place(context, builder, array, arguments[0], arguments[1], form)
    return builder.load(pointer, align=alignment)


def _place(context, builder, array, value, first, form):
    """Generate code for the pointer to a vector in an array. Returns the pointer and the array's alignment."""
    data = context.make_array(array)(context, builder, value).data
    pointer = builder.bitcast(builder.gep(data, [first]), form.as_pointer())
    return pointer, context.get_abi_sizeof(form.element)


def _form(context, vector):
    """Returns LLVM's type of a vector."""
    return context.get_value_type(vector)


def filled_with(builder, number, form):
    """Generate code for a vector whose numbers all equal ``number``."""
    single = builder.insert_element(ir.Constant(form, ir.Undefined), number, _LANE(0))
    return shuffled(builder, single, [0] * form.count)


def shuffled(builder, vector, order):
    """Generate code for the vector of the numbers of ``vector`` at the places in ``order``."""
    order = list(order)
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_LANE, len(order)), order))


def _called(builder, name, *vectors):
    """Generate a call of an LLVM function whose arguments are vectors of one type."""
    form = vectors[0].type
    function = ir.FunctionType(form, [form] * len(vectors))
    whole_name = f"{name}.v{form.count}{form.element.intrinsic_name}"
    return builder.call(cgutils.get_or_insert_function(builder.module, function, whole_name), vectors)
