"""Speed of encoding and decoding against a copy of the same tensor, on one thread of the CPU or on a GPU.

    python -m benchmarks.kernels --save
    python -m benchmarks.kernels --device cuda --save

The cast to bf16 and back is measured as well: torch's own compression hook costs as much. `benchmarks.gpu_kernels` says
what is measured on a GPU.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import Tensor

from benchmarks import gpu_kernels
from benchmarks.report import Report, command_line, present
from lightning_gqsgd.codecs import Codec
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.choosing import codec_of
from lightning_gqsgd.kernels import kernels_for
from lightning_gqsgd.kernels.layout import PIECE_NUMEL, Segment, pieces, place, table_of, whole
from lightning_gqsgd.kernels.protocol import Coding
from lightning_gqsgd.kernels.wire import scale_format
from lightning_gqsgd.predict.timing import Case, Spread, in_turns

#: Options that belong to one device, with their defaults.
OF_DEVICE = {
    "cpu": {"numel": [6_553_600], "bits": [8, 4, 2], "block_size": [256], "codec": ["linear"]},
    "cuda": {"megabytes": gpu_kernels.MEGABYTES, "ranks": 8},
}


def codec_cases(x: Tensor, codec: Codec, block_size: int) -> tuple[Case, Case]:
    """Encoding and decoding of a tensor as one rank does them, piece by piece, into buffers that already exist."""
    form, quantiser = scale_format(x.dtype), codec.quantiser(block_size)
    blocks = pieces(whole([Segment(0, x.numel(), raw=False)], block_size), PIECE_NUMEL, block_size)
    tables = [table_of(piece, block_size) for piece in blocks]
    layouts = [place(t, quantiser, shards=1, scale_bytes=form.nbytes, raw_bytes=form.raw_bytes) for t in tables]
    messages = [torch.zeros(layout.message_bytes, dtype=torch.uint8) for layout in layouts]
    kernels, key = kernels_for(x.device), (1, 2)
    numels = [sum(run.numel for run in piece) for piece in blocks]
    inputs, outputs = x.split(numels), torch.empty_like(x).split(numels)

    def encode() -> None:
        for part, layout, message in zip(inputs, layouts, messages, strict=True):
            kernels.encode(part, Coding(layout.blocks, quantiser), message, key)

    def decode() -> None:
        for part, layout, message in zip(outputs, layouts, messages, strict=True):
            kernels.decode(message.view(1, -1), Coding(layout.blocks, quantiser), part, (key,))

    return encode, decode


def cast_cases(x: Tensor) -> tuple[Case, Case]:
    """The cast of a tensor to bf16, and the cast back."""
    small, out = torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(x)
    return partial(small.copy_, x), partial(out.copy_, small)


def measure(options: argparse.Namespace) -> Report:
    """Run all cases on the device of the command line."""
    for device, defaults in OF_DEVICE.items():
        for name, default in defaults.items():
            given = getattr(options, name)
            if device != options.device and given is not None:
                option = name.replace("_", "-")
                raise SystemExit(f"--{option} is for --device {device}, this is {options.device}; leave it out")
            setattr(options, name, default if given is None else given)
    return gpu_kernels.measure(options) if options.device == "cuda" else measure_on_cpu(options)


def measure_on_cpu(options: argparse.Namespace) -> Report:
    """Run all cases in turns on one thread."""
    torch.set_num_threads(1)
    report = Report(
        "kernels_cpu",
        "CPU kernels against copy_, one thread",
        {
            "case": "",
            "numel": ",d",
            "dtype": "",
            "copy_ (ms)": ".2f",
            "encode (ms)": ".2f",
            "decode (ms)": ".2f",
            "(encode + decode) / copy_": ".2f",
            "encode + decode (GB/s of gradient)": ".1f",
        },
        notes=(
            "The ratio is the median over rounds of times within one round. Buffers are allocated beforehand. "
            "Encoding reads each coordinate twice, for the scale of its block and for its code, but from memory once.",
        ),
    )
    for numel in options.numel:
        x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
        pairs = {
            _name(codec, bits, block): codec_cases(x, codec_of(GQSGDConfig(codec=codec, bits=bits)), block)
            for bits in options.bits
            for block in options.block_size
            for codec in options.codec
        }
        _measure_one(x, {"cast to bf16": cast_cases(x), **pairs}, options.rounds, report)
    return report


def _name(codec: str, bits: int, block_size: int) -> str:
    """How a row is called; linear codes go without saying."""
    return f"{bits} bit, blocks of {block_size}, {'' if codec == 'linear' else codec + ', '}adaptive"


def _measure_one(x: Tensor, pairs: dict[str, tuple[Case, Case]], rounds: int, report: Report) -> None:
    out = torch.empty_like(x)
    cases: dict[str, Case] = {"copy": partial(out.copy_, x)}
    for name, (encode, decode) in pairs.items():
        cases |= {f"{name}/encode": encode, f"{name}/decode": decode}
    seconds = in_turns(cases, rounds)
    for name in pairs:
        both = seconds[f"{name}/encode"] + seconds[f"{name}/decode"]
        report.rows.append(
            [
                name,
                x.numel(),
                str(x.dtype).removeprefix("torch."),
                *(1e3 * Spread.of(seconds[key]).median for key in ("copy", f"{name}/encode", f"{name}/decode")),
                Spread.of(both / seconds["copy"]).median,
                x.numel() * x.element_size() / Spread.of(both).median / 1e9,
            ]
        )


def main() -> None:
    """Run the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--device", choices=list(OF_DEVICE), default="cpu")
    parser.add_argument("--rounds", type=int, default=40)
    cpu = parser.add_argument_group("with --device cpu")
    cpu.add_argument("--numel", type=int, nargs="+", help="sizes (default 6553600, 25 MiB)")
    cpu.add_argument("--bits", type=int, nargs="+", help="default 8 4 2")
    cpu.add_argument("--block-size", type=int, nargs="+", help="default 256")
    cpu.add_argument("--codec", nargs="+", choices=["linear", "companded", "eden", "trellis"], help="default linear")
    cuda = parser.add_argument_group("with --device cuda")
    cuda.add_argument("--megabytes", type=float, nargs="+", help="of gradient (default 1 25 100 1000)")
    cuda.add_argument("--ranks", type=int, help="number of messages that are reduced (default 8)")
    present(parser, measure)


if __name__ == "__main__":
    main()
