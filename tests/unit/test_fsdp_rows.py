"""The parameters in a row of FSDP's flat tensors, which FSDP does not tell."""

from __future__ import annotations

from itertools import compress, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gqsgd.frameworks.fsdp_modules import MOST_LENGTHS, ShardedParameter, present


def parameters_of(shares: list[int]) -> list[ShardedParameter]:
    return [ShardedParameter(number, str(number), 2 * share, False, share=share) for number, share in enumerate(shares)]


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(0, 40))
def test_the_only_selection_of_this_length_is_found(shares: list[int], numel: int) -> None:
    parameters = parameters_of(shares)
    some = [one for one in parameters if one.share]
    every = [list(compress(some, taken)) for taken in product((False, True), repeat=len(some))]
    fitting = [selection for selection in every if sum(one.share for one in selection) == numel]
    assert present(parameters, numel) == (fitting[0] if len(fitting) == 1 else None)


@pytest.mark.timeout(20)
def test_many_parameters_are_no_long_search() -> None:
    parameters = parameters_of([2**number for number in range(60)])
    assert present(parameters, 2**60 - 2) is None
    assert present(parameters[:12], MOST_LENGTHS - 2) == parameters[1:12]


def test_all_of_many_parameters_are_found_whatever_their_sizes() -> None:
    parameters = parameters_of([2**number for number in range(60)])
    assert present(parameters, 2**60 - 1) == parameters
