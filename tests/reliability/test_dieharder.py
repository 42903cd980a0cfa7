"""Robert G. Brown's battery of tests for random numbers, dieharder, on the words that dither is made of.

Each word of 32 bits is the dither of two coordinates. Words are tested in every order in which something else changes
from one to the next: the coordinate, the block, the parameter, the step, the rank.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.kernels.dither import words
from lightning_gqsgd.kernels.layout import COLUMNS, INDEX, LENGTH, PARAMETER
from lightning_gqsgd.reducers.base import step_key
from tests.reliability.knobs import SEED

#: Numbers of dieharder's tests (`dieharder -l`): birthdays, ranks of matrices, bit stream, ones, runs, greatest common
#: divisors, serial, permutations, bytes, cosines, and monobits. Those that dieharder calls suspect are left out.
TESTS = (0, 2, 3, 4, 8, 9, 15, 17, 101, 102, 202, 205, 206, 209)
#: dieharder's own limit for a failure, at either end.
LIMIT = 1e-6
#: Words of a block of 128 coordinates.
WORDS = 64
CONFIG = GQSGDConfig(seed=SEED)


def _blocks(parameters: Tensor | int, indices: Tensor | int, count: int) -> Tensor:
    table = torch.zeros(count, COLUMNS, dtype=torch.int64)
    table[:, PARAMETER] = parameters
    table[:, INDEX] = indices
    table[:, LENGTH] = 2 * WORDS
    return table


def _coordinates(chunk: int) -> Tensor:
    """Coordinate after coordinate of one parameter."""
    indices = torch.arange(4096 * chunk, 4096 * (chunk + 1))
    return words(_blocks(0, indices, 4096), step_key(CONFIG.seed, 5, 1), torch.arange(WORDS))


def _every_block(chunk: int) -> Tensor:
    """The same coordinate of block after block."""
    indices = torch.arange(2**18 * chunk, 2**18 * (chunk + 1))
    return words(_blocks(0, indices, 2**18), step_key(CONFIG.seed, 5, 1), torch.tensor([7]))


def _parameters(chunk: int) -> Tensor:
    """The same coordinate of parameter after parameter."""
    numbers = torch.arange(2**18 * chunk, 2**18 * (chunk + 1))
    return words(_blocks(numbers, 3, 2**18), step_key(CONFIG.seed, 5, 1), torch.tensor([7]))


def _steps(chunk: int) -> Tensor:
    """One block in step after step."""
    block, places = _blocks(3, 1, 1), torch.arange(WORDS)
    keys = [step_key(CONFIG.seed, step, 1) for step in range(512 * chunk, 512 * (chunk + 1))]
    return torch.cat([words(block, key, places) for key in keys])


def _ranks(chunk: int) -> Tensor:
    """The same coordinate of 64 ranks, coordinate after coordinate."""
    blocks, places = _blocks(0, torch.arange(64 * chunk, 64 * (chunk + 1)), 64), torch.arange(WORDS)
    return torch.stack([words(blocks, step_key(CONFIG.seed, 5, rank), places) for rank in range(64)], -1)


def _p_values(number: int, order: Callable[[int], Tensor]) -> dict[str, float]:
    """p-values of one of dieharder's tests by name, on as many words as it asks for."""
    command = ["dieharder", "-g", "200", "-d", str(number), "-c", ","]
    command += [flag for column in ("test_name", "ntuple", "pvalues") for flag in ("-D", column)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        chunk = 0
        with contextlib.suppress(BrokenPipeError):  # the test has had enough
            while process.poll() is None:
                process.stdin.write(order(chunk).numpy().astype(np.uint32).tobytes())
                chunk += 1
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        lines = process.stdout.read().decode().splitlines()
    rows = [[cell.strip() for cell in line.split(",")] for line in lines if "," in line]
    return {f"{name} {size}": float(value) for name, size, value in (row[:3] for row in rows)}


@pytest.mark.reliability
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("dieharder") is None, reason="needs dieharder (Debian: apt-get install dieharder)")
@pytest.mark.parametrize("order", [_coordinates, _every_block, _parameters, _steps, _ranks])
def test_dieharder_finds_nothing_in_the_dither(order: Callable[[int], Tensor]) -> None:
    values: dict[str, float] = {}
    for number in TESTS:
        found = _p_values(number, order)
        assert found, f"dieharder printed nothing for test {number}"
        values |= found
    least, most = min(values.values()), max(values.values())
    print(f"{order.__name__.strip('_')}: {len(values)} p-values from {least:.2g} to {most:.6f}")
    assert LIMIT < least <= most < 1 - LIMIT, {name: p for name, p in values.items() if not LIMIT < p < 1 - LIMIT}
