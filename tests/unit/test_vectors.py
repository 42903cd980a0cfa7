"""Operations on vectors of the CPU's kernels, where processors with and without some instructions have other ones."""

import numba
import numpy as np
import pytest
from llvmlite import binding

from lightning_gqsgd.kernels.cpu import vectors
from lightning_gqsgd.kernels.cpu.vectors import VECTOR_BYTES, load, load_like, one_of_eight, store


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("instructions", ["", "avx2", "avx512f"])
def test_a_table_is_looked_up_alike_with_all_instructions(instructions: str, dtype, monkeypatch) -> None:
    if instructions and not binding.get_host_cpu_features().get(instructions):
        pytest.skip(f"this processor has no {instructions}")
    monkeypatch.setattr(vectors, "features_of", lambda context: [f"+{instructions}"])

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
