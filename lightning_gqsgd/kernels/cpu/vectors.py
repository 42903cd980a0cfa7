"""Vectors of numbers, for loops that LLVM does not make vectors of by itself.

LLVM vectorises a loop over arrays after it has checked that the arrays do not overlap, which takes longer than a loop
over a short block, and it does not find the pattern of a butterfly. A vector here has 64 bytes of coordinates, 16 fp32
or 8 fp64 numbers, and as many integers or truth values where these go with coordinates. LLVM splits it where the
processor has shorter vectors. `+`, `-` and `*` work on two vectors of floats.

Nothing is checked: a vector that is loaded or stored has to lie within its array.
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

#: Bytes of a vector of coordinates.
VECTOR_BYTES = 64

_LANE = ir.IntType(32)


class Vector(types.Type):
    """The type of a vector.

    Attributes:
        dtype: the type of its numbers; `types.boolean` for the result of a comparison.
        lanes: how many numbers it has.
    """

    def __init__(self, dtype: types.Type, lanes: int) -> None:
        super().__init__(name=f"Vector({dtype}, {lanes})")
        self.dtype = dtype
        self.lanes = lanes


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    """How LLVM holds a vector."""

    def __init__(self, manager: Any, vector: Vector) -> None:
        number = ir.IntType(1) if vector.dtype == types.boolean else manager.lookup(vector.dtype).get_data_type()
        super().__init__(manager, vector, ir.VectorType(number, vector.lanes))


def lanes_of(dtype: Any) -> int:
    """Returns the number of coordinates of a dtype in one vector."""
    return int(VECTOR_BYTES * 8 // dtype.bitwidth)


@intrinsic
def lanes(typing_context, array):
    """Returns the number of coordinates of an array that one vector has."""

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
    """Returns a vector of as many numbers as the vector ``like`` has, from number ``first`` of an array on."""
    vector = Vector(array.dtype, like.lanes)
    return vector(array, types.intp, like), _load


@intrinsic
def load_codes(typing_context, array, first, like):
    """Returns a vector of unsigned bytes, as `load_like`, as signed 32-bit integers."""

    def generate(context, builder, signature, arguments):
        return builder.zext(_load(context, builder, signature, arguments), _form(context, signature.return_type))

    return Vector(types.int32, like.lanes)(array, types.intp, like), generate


@intrinsic
def store(typing_context, array, first, vector):
    """Put a vector into an array, from its number ``first`` on. Integers lose the bits that the array has no space
    for."""

    def generate(context, builder, signature, arguments):
        array, first, vector = arguments
        target = ir.VectorType(context.get_data_type(signature.args[0].dtype), signature.args[2].lanes)
        vector = builder.trunc(vector, target) if vector.type != target else vector
        builder.store(vector, *_place(context, builder, signature.args[0], array, first, target))
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), generate


@intrinsic
def filled(typing_context, number, like):
    """Returns a vector of floats, as many as the vector ``like`` has, all of which are one number."""

    def generate(context, builder, signature, arguments):
        return filled_with(builder, arguments[0], _form(context, signature.return_type))

    return Vector(number, like.lanes)(number, like), generate


@intrinsic
def filled_codes(typing_context, number, like):
    """Returns a vector of 32-bit integers, as many as the vector ``like`` has, all of which are one integer."""

    def generate(context, builder, signature, arguments):
        form = _form(context, signature.return_type)
        return filled_with(builder, builder.trunc(arguments[0], form.element), form)

    return Vector(types.int32, like.lanes)(types.int64, like), generate


@intrinsic
def butterflies(typing_context, vector):
    """Returns the butterflies of the distances 1, 2, 4, ... within a vector, one after the other.

    In a butterfly, the sum takes the place of the number on the left, and the difference takes that of the number on
    the right. Both are the other number of the pair, plus the number times 1 or -1, which is exact.
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
    """Returns the sum of a vector: its second half is added to its first half, until one number is left."""

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
    """Returns a vector of floats, negated where a bit of 32-bit integers is 0.

    Args:
        vector: the floats.
        words: as many integers.
        shift: by how much the bit that counts has to be shifted up to become the highest one.
    """

    def generate(context, builder, signature, arguments):
        return _with_signs(context, builder, signature, *arguments, builder.not_)

    return vector(vector, words, types.int64), generate


@intrinsic
def negated_by(typing_context, vector, codes, shift):
    """Returns a vector of floats, negated where a bit of 32-bit integers is 1; the arguments are those of `flipped`."""

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
    """Returns where the floats of one vector are as large as those of another, or larger."""

    def generate(context, builder, signature, arguments):
        return builder.fcmp_ordered(">=", *arguments)

    return Vector(types.boolean, left.lanes)(left, right), generate


@intrinsic
def are_negative(typing_context, vector):
    """Returns where floats are below zero; -0 is not."""

    def generate(context, builder, signature, arguments):
        return builder.fcmp_ordered("<", arguments[0], ir.Constant(arguments[0].type, [0.0] * arguments[0].type.count))

    return Vector(types.boolean, vector.lanes)(vector), generate


@intrinsic
def chosen(typing_context, condition, yes, no):
    """Returns the numbers of ``yes`` where a condition holds, and those of ``no`` elsewhere."""

    def generate(context, builder, signature, arguments):
        return builder.select(*arguments)

    return yes(condition, yes, no), generate


@intrinsic
def negated_where(typing_context, condition, vector):
    """Returns a vector of floats with the other sign where a condition holds."""

    def generate(context, builder, signature, arguments):
        condition, vector = arguments
        return builder.select(condition, builder.fneg(vector), vector)

    return vector(condition, vector), generate


@intrinsic
def code_of(typing_context, condition, value):
    """Returns a vector of 32-bit integers: ``value`` where a condition holds, and 0 elsewhere."""

    def generate(context, builder, signature, arguments):
        form = _form(context, signature.return_type)
        value = filled_with(builder, builder.trunc(arguments[1], form.element), form)
        return builder.select(arguments[0], value, ir.Constant(form, [0] * form.count))

    return Vector(types.int32, condition.lanes)(condition, types.int64), generate


@intrinsic
def has_bit(typing_context, vector, place):
    """Returns where integers have the bit that counts 2^``place``."""

    def generate(context, builder, signature, arguments):
        vector, place = arguments
        element = vector.type.element
        bit = builder.shl(element(1), builder.trunc(place, element))
        bits = builder.and_(vector, filled_with(builder, bit, vector.type))
        return builder.icmp_unsigned("!=", bits, ir.Constant(vector.type, [0] * vector.type.count))

    return Vector(types.boolean, vector.lanes)(vector, types.int64), generate


@intrinsic
def shifted_down(typing_context, vector, count):
    """Returns a vector of integers that are not negative, shifted down by ``count`` bits."""

    def generate(context, builder, signature, arguments):
        vector, count = arguments
        return builder.lshr(vector, filled_with(builder, builder.trunc(count, vector.type.element), vector.type))

    return vector(vector, types.int64), generate


@intrinsic
def entry(typing_context, table, place):
    """Returns a vector all of whose numbers are the number at one place of a vector."""

    def generate(context, builder, signature, arguments):
        table, place = arguments
        return filled_with(builder, builder.extract_element(table, builder.trunc(place, _LANE)), table.type)

    return table(table, types.int64), generate


@intrinsic
def one_of_eight(typing_context, places, table):
    """Returns the numbers of a table of floats at places that the three lowest bits of 32-bit integers say.

    Args:
        places: as many integers as a vector of floats has numbers.
        table: a vector whose first eight numbers are the table. It repeats them if it has more.
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
    """Returns a vector of integers, shifted up by ``count`` bits."""

    def generate(context, builder, signature, arguments):
        vector, count = arguments
        return builder.shl(vector, filled_with(builder, builder.trunc(count, vector.type.element), vector.type))

    return vector(vector, types.int64), generate


@intrinsic
def either(typing_context, left, right):
    """Returns the bits that one of two vectors of integers has."""

    def generate(context, builder, signature, arguments):
        return builder.or_(*arguments)

    return left(left, right), generate


@intrinsic
def both(typing_context, left, right):
    """Returns the bits that both of two vectors of integers have."""

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
    """Returns the instruction sets that code is generated for, in LLVM's spelling; empty if they are not known."""
    _, _, features = context.codegen().magic_tuple()
    return features.split(",")


def permuted(builder, name, table, places):
    """Generate the numbers of a table at places, by an instruction."""
    function = ir.FunctionType(table.type, [table.type, places.type])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), [table, places])


def _truths(form):
    """Returns LLVM's type of as many truth values as a vector has numbers."""
    return ir.VectorType(ir.IntType(1), form.count)


def _with_signs(context, builder, signature, vector, words, shift, signs_of):
    """Generate the vector with other signs; ``signs_of`` generates what has them as its highest bits."""
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
    """Let an operator of Python work on two vectors of floats."""

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
    """Generate a vector of numbers of an array."""
    array = signature.args[0]
    form = ir.VectorType(context.get_data_type(array.dtype), signature.return_type.lanes)
    pointer, alignment = _place(context, builder, array, arguments[0], arguments[1], form)
    return builder.load(pointer, align=alignment)


def _place(context, builder, array, value, first, form):
    """Generate the pointer to a vector in an array; returns it and the array's alignment."""
    data = context.make_array(array)(context, builder, value).data
    pointer = builder.bitcast(builder.gep(data, [first]), form.as_pointer())
    return pointer, context.get_abi_sizeof(form.element)


def _form(context, vector):
    """Returns LLVM's type of a vector."""
    return context.get_value_type(vector)


def filled_with(builder, number, form):
    """Generate a vector all of whose numbers are one."""
    single = builder.insert_element(ir.Constant(form, ir.Undefined), number, _LANE(0))
    return shuffled(builder, single, [0] * form.count)


def shuffled(builder, vector, order):
    """Generate the vector with the numbers of a vector in an order."""
    order = list(order)
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_LANE, len(order)), order))


def _called(builder, name, *vectors):
    """Generate the call of one of LLVM's functions of vectors of one type."""
    form = vectors[0].type
    function = ir.FunctionType(form, [form] * len(vectors))
    whole_name = f"{name}.v{form.count}{form.element.intrinsic_name}"
    return builder.call(cgutils.get_or_insert_function(builder.module, function, whole_name), vectors)
