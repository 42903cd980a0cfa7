"""Compiles some kernels for a GPU that need not be there, and prints what came out: JSON, the last line.

TRITON_INTERPRET=0 python tests/unit/compile_for_gpu.py few|all
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from lightning_gqsgd.codecs import Codec, CompandedCodec, EdenCodec, ExponentialCodec, LinearCodec, TopKCodec
from lightning_gqsgd.codecs.floats.codec import largest
from lightning_gqsgd.kernels import cuda
from lightning_gqsgd.kernels.cuda import launch
from lightning_gqsgd.kernels.cuda.constants import Constants
from lightning_gqsgd.kernels.layout import Layout, Segment, cut, place
from lightning_gqsgd.kernels.protocol import Own, Quantiser
from lightning_gqsgd.kernels.wire import Key, scale_format


class Hopper:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


class Compiler:
    """Takes the place of `launch.run`: compiles each kernel instead of running it, and counts its instructions.

    Attributes:
        case: what is being compiled, for the names of `counts`.
        counts: by case and kernel, how often each kind of instruction occurs.
    """

    def __init__(self) -> None:
        self.case = ""
        self.counts: dict[str, dict[str, int]] = {}

    def __call__(self, kernel: Any, blocks: Tensor, c: Constants, *arguments: Any, **constants: Any) -> None:
        compiled = kernel.warmup(*arguments, grid=(1,), c=c, **launch.options(c), **constants)
        ptx = compiled.asm["ptx"]
        self.counts[f"{self.case} {kernel.fn.__name__}"] = {
            "v4 loads": len(re.findall(r"ld\.global\.v4", ptx)),
            "v4 stores": len(re.findall(r"st\.global\.v4", ptx)),
            "inexact divisions": ptx.count("div.full") + ptx.count("div.approx"),
            "inexact roots": ptx.count("sqrt.approx"),
            # Decoding has contracted products on purpose, which are exact: of the dither and the level at zero.
            "contracted": ptx.count("fma.rn") if "encode" in kernel.fn.__name__ else 0,
        }


#: By name: codec, dtype of the gradients, rotation. The first two are compiled in every run of the tests.
CASES: dict[str, tuple[Codec, torch.dtype, Key | None]] = {
    "8 bit, fp32": (LinearCodec(8, "adaptive"), torch.float32, None),
    "exponential, fp16": (ExponentialCodec(8), torch.float16, None),
    "4 bit, bf16": (LinearCodec(4, "adaptive"), torch.bfloat16, None),
    "4 bit, companded, bf16": (CompandedCodec(4), torch.bfloat16, None),
    "4 bit, EDEN, bf16": (EdenCodec(4), torch.bfloat16, None),
    "3 bit, fp32": (LinearCodec(3, "stochastic"), torch.float32, None),
    "8 bit, fp32, rotated": (LinearCodec(8, "adaptive"), torch.float32, (1, 2)),
    "top-k, bf16": (TopKCodec(0.01), torch.bfloat16, None),
}
FEW = 2
NUMEL = 8192


def compile_stages(codec: Codec, dtype: torch.dtype, rotation: Key | None, *, reduces: bool) -> None:
    """Encode and decode a message, and reduce two."""
    q, x = codec.quantiser(256), torch.ones(NUMEL).to(dtype)
    layout = layout_for(q, dtype)
    wires = torch.zeros(2, layout.message_bytes, dtype=torch.uint8)
    cuda.encode(x, layout.blocks, wires[0], q, (1, 2), rotation=rotation)
    cuda.decode(wires[:1], layout.blocks, x, q, [(1, 2)], rotation=rotation)
    if reduces:
        cuda.reduce(wires, layout.blocks, wires[0], q, [(1, 2), (3, 4)], (5, 6), Own(0, x, rotation))


def compile_sums(compiler: Compiler) -> None:
    """Decode sums of linear codes, in lanes of bytes and of words, and add exponential codes; then the measures."""
    x = torch.ones(NUMEL)
    for codec in (LinearCodec(8, "subtractive"), LinearCodec(3, "subtractive"), ExponentialCodec(8)):
        compiler.case, q = f"sums, {type(codec).__name__} of {codec.bits} bit", codec.quantiser(256, 2)
        layout = layout_for(q, x.dtype)
        wires = torch.zeros(2, layout.message_bytes, dtype=torch.uint8)
        cuda.decode_sum(wires[0], cuda.block_maxima(x, layout.blocks), layout.blocks, x, q, [(1, 2), (3, 4)])
    cuda.combine(wires[0], wires[1], layout.blocks, q, (1, 2))
    cuda.block_moments(x, layout.blocks)
    cuda.rotate(x, layout.blocks, (1, 2), 256)


def compile_rounding(compiler: Compiler) -> None:
    """Round gradients to bf16."""
    compiler.case, x = "rounding", torch.ones(NUMEL)
    blocks = torch.from_numpy(cut([Segment(0, NUMEL, False)], 1024))
    cuda.narrow(x, blocks, torch.zeros(NUMEL, dtype=torch.bfloat16), (1, 2), 0.5, largest(2))


def layout_for(q: Quantiser, dtype: torch.dtype) -> Layout:
    """The layout of one parameter's message."""
    form = scale_format(dtype)
    scale_bytes = form.nbytes if q.has_scale and not q.summable else 0
    table = cut([Segment(0, NUMEL, False)], 256)
    return place(table, q, shards=1, scale_bytes=scale_bytes, raw_bytes=form.raw_bytes)


def main(which: str) -> None:
    driver.set_active(Hopper())
    compiler = Compiler()
    launch.run = compiler
    for number, (compiler.case, case) in enumerate(CASES.items()):
        if number < FEW or which == "all":
            compile_stages(*case, reduces=number == 0 or which == "all")
    compile_rounding(compiler)
    if which == "all":
        compile_sums(compiler)
    print(json.dumps(compiler.counts))


if __name__ == "__main__":
    main(sys.argv[1])
