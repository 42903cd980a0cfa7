"""Operations on vectors of the CPU's kernels, where processors with and without some instructions have other ones."""

import numba
import numpy as np
import pytest
from llvmlite import binding

from lightning_gqsgd.codecs.trellis import cpu_vectors
from lightning_gqsgd.codecs.trellis.cpu_vectors import swapped
from lightning_gqsgd.kernels.cpu import vectors
from lightning_gqsgd.kernels.cpu.vectors import VECTOR_BYTES, load, load_like, one_of_eight, store


@pytest.fixture(params=["", "avx2", "avx512f"])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The instructions that functions which are compiled in a test may take; empty: those that all processors have."""
    if request.param and not binding.get_host_cpu_features().get(request.param):
        pytest.skip(f"this processor has no {request.param}")
    for module in (vectors, cpu_vectors):
        monkeypatch.setattr(module, "features_of", lambda context: [f"+{request.param}"])


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_table_is_looked_up_alike_with_all_instructions(dtype) -> None:
    @numba.njit
    def look_up(places, table, out):
        numbers = load(table, 0)
        store(out, 0, one_of_eight(load_like(places, 0, numbers), numbers))

    count = VECTOR_BYTES // np.dtype(dtype).itemsize
    table = np.resize(np.arange(8).astype(dtype) - 3.5, count)
    places = np.arange(count, dtype=np.int32) * 37 % 256  # the bits above the three lowest ones do not count
    out = np.empty(count, dtype)
    look_up(places, table, out)
    np.testing.assert_array_equal(out, table[places % 8])


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numbers_change_places_alike_with_all_instructions(dtype) -> None:
    @numba.njit
    def swap(numbers, number, out):
        store(out, 0, swapped(load(numbers, 0), number))

    count = VECTOR_BYTES // np.dtype(dtype).itemsize
    numbers = np.arange(count).astype(dtype) - 3.5
    out = np.empty(count, dtype)
    for number in range(count):
        swap(numbers, number, out)
        np.testing.assert_array_equal(out, numbers[np.arange(count) ^ number])
