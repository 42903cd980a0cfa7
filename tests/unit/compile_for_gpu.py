"""Compiles some kernels for a GPU that need not be there, and prints what came out: JSON, the last line.

TRITON_INTERPRET=0 python tests/unit/compile_for_gpu.py
"""

from __future__ import annotations

import json
import re
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from lightning_gqsgd.codecs import ExponentialCodec, LinearCodec
from lightning_gqsgd.kernels import cuda
from lightning_gqsgd.kernels.cuda import launch
from lightning_gqsgd.kernels.cuda.constants import Constants
from lightning_gqsgd.kernels.wire import scale_format
from lightning_gqsgd.layout import Segment, cut, place


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
            # Decoding has contracted products on purpose, which are exact: of the dither and the level at zero.
            "contracted": ptx.count("fma.rn") if "encode" in kernel.fn.__name__ else 0,
        }


def main() -> None:
    driver.set_active(Hopper())
    compiler = Compiler()
    launch.run = compiler
    linear = LinearCodec(8, "adaptive").quantiser(256)
    cases = {
        "8 bit, fp32": (linear, torch.float32, None),
        "4 bit, bf16": (LinearCodec(4, "adaptive").quantiser(256), torch.bfloat16, None),
        "3 bit, fp32": (LinearCodec(3, "stochastic").quantiser(256), torch.float32, None),
        "exponential, fp16": (ExponentialCodec(8).quantiser(256), torch.float16, None),
        "8 bit, fp32, rotated": (linear, torch.float32, (1, 2)),
    }
    for compiler.case, (q, dtype, rotation) in cases.items():
        x, form = torch.ones(8192).to(dtype), scale_format(dtype)
        table = cut([Segment(0, 8192, False)], 256)
        layout = place(table, q, shards=1, scale_bytes=form.nbytes, raw_bytes=form.raw_bytes)
        wires = torch.zeros(2, layout.message_bytes, dtype=torch.uint8)
        cuda.encode(x, layout.blocks, wires[0], q, (1, 2), rotation=rotation)
        cuda.decode(wires[:1], layout.blocks, x, q, [(1, 2)], rotation=rotation)
        if compiler.case.startswith("8 bit, fp32") and rotation is None:
            cuda.reduce(wires, layout.blocks, wires[0], q, [(1, 2), (3, 4)], (5, 6), dtype)
    print(json.dumps(compiler.counts))


if __name__ == "__main__":
    main()
