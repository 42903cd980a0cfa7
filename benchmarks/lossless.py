"""Bits of gradients whose exponents are entropy-coded, and how fast one thread codes them.

    GQSGD_DATA=FOLDER python -m benchmarks.lossless --save

Without a folder with WikiText-2, the text is that of Python's ``help``.
"""

from __future__ import annotations

import argparse
import timeit
import zlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.report import Report, command_line, present
from benchmarks.virtual_characters import VirtualCharacters
from lightning_gqsgd.reducers.elias.tables import omega_code
from lightning_gqsgd.reducers.lossless import pack, unpack
from lightning_gqsgd.research.simulation import simulate
from lightning_gqsgd.research.simulation.problems import DigitsMLP, Problem

#: Steps of Adam before the later gradients are taken.
STEPS = 200
#: Bytes that are coded for the speeds, about.
SIZE = 1 << 24


def gradients() -> Iterator[tuple[str, Tensor]]:
    """Gradients of one worker in fp32, with their names."""
    yield "normal numbers", torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    problems: dict[str, Problem] = {"character transformer": VirtualCharacters(), "digits": DigitsMLP()}
    for name, problem in problems.items():
        yield f"{name}, first step", problem.gradients(problem.start(), 0, 1)[0]
        record = simulate(
            "ddp",
            problem,
            workers=1,
            steps=STEPS,
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3),
            record_every=STEPS,
            progress=False,
        )
        yield f"{name}, after {STEPS} steps", problem.gradients(torch.from_numpy(record.parameters), STEPS, 1)[0]


def exponents(x: Tensor) -> Tensor:
    """Returns the exponents of bf16 or fp32 numbers, 0 to 255, int64."""
    integer = torch.int16 if x.dtype == torch.bfloat16 else torch.int32
    return (x.view(integer).long() >> 8 * x.dtype.itemsize - 9) & 0xFF


def entropy(symbols: Tensor) -> float:
    """Returns the entropy of symbols in bits."""
    shares = symbols.bincount().double() / len(symbols)
    return float(-(shares[shares > 0] * shares[shares > 0].log2()).sum())


def elias_bits(symbols: Tensor) -> float:
    """Returns the mean bits of Elias omega codes of the distance from the most frequent symbol, each with a sign."""
    counts = symbols.bincount()
    middle = int(counts.argmax())
    lengths = [len(omega_code(abs(symbol - middle) + 1)) + (symbol != middle) for symbol in range(len(counts))]
    return float((counts * torch.tensor(lengths)).sum() / len(symbols))


def megabytes_per_second(call: Callable[[], object], nbytes: int) -> float:
    """Returns the rate of the fastest of five calls."""
    return nbytes / min(timeit.repeat(call, repeat=5, number=1)) / 1e6


def measure(options: argparse.Namespace) -> Report:
    """Code all gradients in both dtypes."""
    report = Report(
        "lossless",
        "Gradients as they are, exponents entropy-coded",
        {
            "gradient": "",
            "dtype": "",
            "bits": ".2f",
            "of the dtype's (%)": ".1f",
            "entropy of exponents": ".2f",
            "Huffman": ".2f",
            "Elias": ".2f",
            "zlib of all bytes (%)": ".1f",
            "coded (MB/s)": ".0f",
            "decoded (MB/s)": ".0f",
        },
        notes=(
            'bits: of one coordinate in a message of `reducer="lossless"`. Huffman: bits of an exponent in it, beside '
            "the entropy, and Elias omega codes of its distance from the most frequent exponent, with a sign. zlib of "
            "all bytes: what `zlib.compress` makes of the gradient at once, in percent of its bytes. coded, decoded: "
            "bytes of the gradient in a second of one thread, of copies of it to 16 MiB.",
            "One worker's gradients, of a batch of 4 windows of 64 characters (WikiText-2, or Python's help), and of "
            f"32 digits. Later gradients: after {STEPS} steps of Adam.",
        ),
    )
    for name, gradient in gradients():
        for dtype in (torch.bfloat16, torch.float32):
            x = gradient.to(dtype)
            message = pack(x)
            assert torch.equal(unpack(message, len(x), dtype).view(torch.uint8), x.view(torch.uint8))
            width = 8 * dtype.itemsize
            bits = 8 * len(message) / len(x)
            many = x.repeat(max(1, SIZE // x.nbytes))
            coded = pack(many)
            report.rows.append(
                [
                    name,
                    str(dtype).removeprefix("torch."),
                    bits,
                    100 * bits / width,
                    entropy(exponents(x)),
                    bits - (width - 8),
                    elias_bits(exponents(x)),
                    100 * len(zlib.compress(x.view(torch.uint8).numpy().tobytes())) / x.nbytes,
                    megabytes_per_second(partial(pack, many), many.nbytes),
                    megabytes_per_second(partial(unpack, coded, len(many), many.dtype), many.nbytes),
                ]
            )
    return report


if __name__ == "__main__":
    present(command_line(__doc__), measure, threads=1)
