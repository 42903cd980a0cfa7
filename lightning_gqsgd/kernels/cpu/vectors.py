"""Vectors of numbers, for loops that LLVM does not vectorise by itself.

Before a vectorised loop over arrays, LLVM's code checks that the arrays do not overlap. This takes longer than a loop
over a short block. LLVM also does not find the pattern of a butterfly. A vector here has 64 bytes of coordinates, which
are 16 fp32 or 8 fp64 numbers. Vectors of integers or truth values that belong to coordinates have as many numbers. If
the processor has shorter vectors, LLVM splits them. `+`, `-` and `*` work on two vectors of floats, and `|` and `&` on
two vectors of integers.

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

from lightning_gqsgd.kernels.cpu.jit import instruction

#: Number of bytes of a vector of coordinates.
VECTOR_BYTES = 64
#: Number of entries in the table of the shorter look-up instruction.
EIGHT = 8

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


@instruction(lambda array: types.intp(array))
def lanes(code, array):
    """Returns the number of coordinates of an array that fit in one vector."""
    return code.context.get_constant(types.intp, lanes_of(code.types[0].dtype))


@instruction(lambda array, first: Vector(array.dtype, lanes_of(array.dtype))(array, types.intp))
def load(code, array, first):
    """Returns the vector of the coordinates of an array from number ``first`` on."""
    return _load(code, array, first)


@instruction(lambda array, first, like: Vector(array.dtype, like.lanes)(array, types.intp, like))
def load_like(code, array, first, like):
    """Returns a vector with as many numbers as the vector ``like``, from number ``first`` of an array on."""
    return _load(code, array, first)


@instruction(lambda array, first, like: Vector(types.int32, like.lanes)(array, types.intp, like))
def load_codes(code, array, first, like):
    """Returns a vector of unsigned bytes like `load_like`, converted to signed 32-bit integers."""
    return code.zext(_load(code, array, first), code.form)


@instruction(lambda array, first, vector: types.void(array, types.intp, vector))
def store(code, array, first, vector):
    """Write a vector into an array, from its number ``first`` on. Integers are truncated to the width of the array's
    numbers."""
    target = ir.VectorType(code.context.get_data_type(code.types[0].dtype), code.types[2].lanes)
    vector = code.trunc(vector, target) if vector.type != target else vector
    code.store(vector, *_place(code, array, first, target))


@instruction(lambda number, like: Vector(number, like.lanes)(number, like))
def filled(code, number, like):
    """Returns a vector of floats that all equal ``number``, with as many numbers as the vector ``like``."""
    return filled_with(code, number, code.form)


@instruction(lambda number, like: Vector(types.int32, like.lanes)(types.int64, like))
def filled_codes(code, number, like):
    """Returns a vector of 32-bit integers that all equal ``number``, with as many numbers as the vector ``like``."""
    form = code.form
    return filled_with(code, code.trunc(number, form.element), form)


@instruction(lambda vector: vector(vector))
def butterflies(code, vector):
    """Returns a vector after butterflies of the distances 1, 2, 4, ... within the vector, one after the other.

    A butterfly replaces the left number of a pair by the sum, and the right number by the difference. Both are computed
    as the other number of the pair, plus the number times 1 or -1. This product is exact.
    """
    distance = 1
    while distance < vector.type.count:
        others = shuffled(code, vector, [lane ^ distance for lane in range(vector.type.count)])
        signs = [-1.0 if lane & distance else 1.0 for lane in range(vector.type.count)]
        vector = _called(code, "llvm.fmuladd", vector, ir.Constant(vector.type, signs), others)
        distance *= 2
    return vector


@instruction(lambda vector: vector.dtype(vector))
def folded(code, vector):
    """Returns the sum of a vector. Its second half is added to its first half until one number is left."""
    while vector.type.count > 1:
        half = vector.type.count // 2
        first, second = (shuffled(code, vector, range(start, start + half)) for start in (0, half))
        vector = code.fadd(first, second)
    return code.extract_element(vector, _LANE(0))


@instruction(lambda vector, words, shift: vector(vector, words, types.int64))
def flipped(code, vector, words, shift):
    """Returns a vector of floats, each negated if a bit of its 32-bit integer is 0.

    Args:
        vector: the floats.
        words: as many integers.
        shift: the shift that moves this bit up to the highest bit.
    """
    return _with_signs(code, vector, words, shift, code.not_)


@instruction(lambda vector, codes, shift: vector(vector, codes, types.int64))
def negated_by(code, vector, codes, shift):
    """Returns a vector of floats, each negated if a bit of its 32-bit integer is 1. The arguments are like those of
    `flipped`."""
    return _with_signs(code, vector, codes, shift, lambda bits: bits)


@instruction(lambda vector: vector(vector))
def magnitudes_of(code, vector):
    """Returns a vector of floats without their signs."""
    return _called(code, "llvm.fabs", vector)


@instruction(lambda left, right: Vector(types.boolean, left.lanes)(left, right))
def are_at_least(code, left, right):
    """Returns whether each float of ``left`` is at least as large as the float of ``right``."""
    return code.fcmp_ordered(">=", left, right)


@instruction(lambda vector: Vector(types.boolean, vector.lanes)(vector))
def are_negative(code, vector):
    """Returns whether each float is below zero. -0 is not below zero."""
    return code.fcmp_ordered("<", vector, repeated(vector.type, 0.0))


@instruction(lambda condition, yes, no: yes(condition, yes, no))
def chosen(code, condition, yes, no):
    """Returns the number of ``yes`` at places where ``condition`` is true, and the number of ``no`` at other places."""
    return code.select(condition, yes, no)


@instruction(lambda condition, vector: vector(condition, vector))
def negated_where(code, condition, vector):
    """Returns a vector of floats, negated at places where ``condition`` is true."""
    return code.select(condition, code.fneg(vector), vector)


@instruction(lambda condition, value: Vector(types.int32, condition.lanes)(condition, types.int64))
def code_of(code, condition, value):
    """Returns a vector of 32-bit integers: ``value`` at places where ``condition`` is true, and 0 at other places."""
    form = code.form
    value = filled_with(code, code.trunc(value, form.element), form)
    return code.select(condition, value, repeated(form, 0))


@instruction(lambda vector, place: Vector(types.boolean, vector.lanes)(vector, types.int64))
def has_bit(code, vector, place):
    """Returns whether the bit with the value 2^``place`` is set in each integer."""
    element = vector.type.element
    bit = code.shl(element(1), code.trunc(place, element))
    bits = code.and_(vector, filled_with(code, bit, vector.type))
    return code.icmp_unsigned("!=", bits, repeated(vector.type, 0))


@instruction(lambda vector, count: vector(vector, types.int64))
def shifted_down(code, vector, count):
    """Returns a vector of non-negative integers shifted down by ``count`` bits."""
    return code.lshr(vector, filled_with(code, code.trunc(count, vector.type.element), vector.type))


@instruction(lambda table, place: table(table, types.int64))
def entry(code, table, place):
    """Returns a vector whose numbers all equal the number at ``place`` of ``table``."""
    return filled_with(code, code.extract_element(table, code.trunc(place, _LANE)), table.type)


@instruction(lambda places, table: table(places, table))
def one_of_eight(code, places, table):
    """Returns numbers from a table of eight floats. The three lowest bits of 32-bit integers are the index.

    Args:
        places: the integers, as many as a vector of floats has numbers.
        table: a vector whose first eight numbers are the table. If it has more numbers, it repeats the table.
    """
    return looked_up(code, places, table)


@instruction(lambda vector, count: vector(vector, types.int64))
def shifted_up(code, vector, count):
    """Returns a vector of integers shifted up by ``count`` bits."""
    return code.shl(vector, filled_with(code, code.trunc(count, vector.type.element), vector.type))


@instruction(lambda vector, limit: vector(vector, vector.dtype))
def clamped(code, vector, limit):
    """Returns a vector of floats, each clamped to the range from -limit to limit. NaN stays NaN."""
    highest = filled_with(code, limit, vector.type)
    lowest = code.fneg(highest)
    vector = code.select(code.fcmp_ordered("<", vector, lowest), lowest, vector)
    return code.select(code.fcmp_ordered(">", vector, highest), highest, vector)


def features_of(code: Any) -> list[str]:
    """Returns the instruction sets for which code is generated, in LLVM's spelling; empty if they are not known."""
    _, _, features = code.context.codegen().magic_tuple()
    return features.split(",")


def permuted(code, name, table, places):
    """Generate one instruction, ``name``, that looks up numbers of a table at places."""
    function = ir.FunctionType(table.type, [table.type, places.type])
    return code.call(cgutils.get_or_insert_function(code.module, function, name), [table, places])


def looked_up(code, places, table):
    """Generate code that looks up numbers of a table of eight floats; the arguments are those of `one_of_eight`."""
    features = features_of(code)
    single = table.type.element == ir.FloatType()
    if single and "+avx512f" in features and table.type.count == 2 * EIGHT:
        return permuted(code, "llvm.x86.avx512.permvar.sf.512", table, places)
    if not single and "+avx512f" in features:
        wide = code.zext(places, ir.VectorType(ir.IntType(64), places.type.count))
        return permuted(code, "llvm.x86.avx512.permvar.df.512", table, wide)
    if single and "+avx2" in features:
        eight = shuffled(code, table, range(EIGHT))
        return in_parts(code, places, lambda part: permuted(code, "llvm.x86.avx2.permps", eight, part))
    return by_bits(code, [shuffled(code, table, [place] * table.type.count) for place in range(EIGHT)], places, 0)


def by_bits(code, vectors, numbers, first):
    """Generate code that selects each number from one of 2^k vectors. The k bits from bit ``first`` on of the integer
    in ``numbers`` select the vector."""
    place = first
    while len(vectors) > 1:
        is_set = bit_is_set(code, numbers, place)
        vectors = [code.select(is_set, *pair) for pair in zip(vectors[1::2], vectors[::2], strict=True)]
        place += 1
    return vectors[0]


def bit_is_set(code, numbers, place):
    """Generate code that tests whether bit ``place`` is set in each integer."""
    form = numbers.type
    return code.icmp_unsigned("!=", code.and_(numbers, repeated(form, 1 << place)), repeated(form, 0))


def in_parts(code, places, generate_part):
    """Generate code for a vector from parts of eight places."""
    count = places.type.count
    parts = [generate_part(shuffled(code, places, range(first, first + EIGHT))) for first in range(0, count, EIGHT)]
    return parts[0] if len(parts) == 1 else joined(code, parts)


def joined(code, parts):
    """Generate code that concatenates two vectors."""
    count = 2 * parts[0].type.count
    return code.shuffle_vector(*parts, ir.Constant(ir.VectorType(_LANE, count), list(range(count))))


def repeated(form, number):
    """Returns the constant vector of the type ``form`` whose numbers are all ``number``."""
    return ir.Constant(form, [number] * form.count)


def _with_signs(code, vector, words, shift, signs_of):
    """Generate code that flips signs of a vector. ``signs_of`` generates integers whose highest bit is 1 for a flip."""
    integer = ir.IntType(32 if code.result.dtype == types.float32 else 64)
    form = ir.VectorType(integer, vector.type.count)
    words = code.zext(words, form) if words.type != form else words
    shift = code.add(shift, shift.type(integer.width - 32))
    shift = code.trunc(shift, integer) if integer.width < 64 else shift
    bits = signs_of(code.shl(words, filled_with(code, shift, form)))
    highest = repeated(form, -(1 << (integer.width - 1)))
    changed = code.xor(code.bitcast(vector, form), code.and_(bits, highest))
    return code.bitcast(changed, vector.type)


def _arithmetic(operation: Any, name: str) -> None:
    """Register an operator of Python for two vectors of one type."""

    @infer_global(operation)
    class _Template(AbstractTemplate):
        def generic(self, args: Sequence[types.Type], kws: Any) -> Any:
            left, *_ = args
            return signature(left, *args) if isinstance(left, Vector) and tuple(args) == (left, left) else None

    @lower_builtin(operation, Vector, Vector)
    def _generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return getattr(builder, name)(*arguments)


_arithmetic(operator.add, "fadd")
_arithmetic(operator.sub, "fsub")
_arithmetic(operator.mul, "fmul")
_arithmetic(operator.or_, "or_")
_arithmetic(operator.and_, "and_")


def _load(code, array, first):
    """Generate code that loads a vector from an array, which is the first argument."""
    form = ir.VectorType(code.context.get_data_type(code.types[0].dtype), code.result.lanes)
    pointer, alignment = _place(code, array, first, form)
    return code.load(pointer, align=alignment)


def _place(code, array, first, form):
    """Generate code for the pointer to a vector in the array that is the first argument. Returns the pointer and the
    array's alignment."""
    data = code.context.make_array(code.types[0])(code.context, code, array).data
    pointer = code.bitcast(code.gep(data, [first]), form.as_pointer())
    return pointer, code.context.get_abi_sizeof(form.element)


def filled_with(code, number, form):
    """Generate code for a vector whose numbers all equal ``number``."""
    single = code.insert_element(ir.Constant(form, ir.Undefined), number, _LANE(0))
    return shuffled(code, single, [0] * form.count)


def shuffled(code, vector, order):
    """Generate code for the vector of the numbers of ``vector`` at the places in ``order``."""
    order = list(order)
    return code.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_LANE, len(order)), order))


def _called(code, name, *vectors):
    """Generate a call of an LLVM function whose arguments are vectors of one type."""
    form = vectors[0].type
    function = ir.FunctionType(form, [form] * len(vectors))
    whole_name = f"{name}.v{form.count}{form.element.intrinsic_name}"
    return code.call(cgutils.get_or_insert_function(code.module, function, whole_name), vectors)
