"""Compiles the kernels for GPUs, on a machine that need not have one, and prints what came out as JSON, the last line.

`benchmarks.compiled` runs this in a process of its own for each version of Triton: Triton decides when it is imported
whether it interprets, and a process has one version. By itself:

    TRITON_INTERPRET=0 python -m benchmarks.compiling --kernels table --arch 90
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.amd import compiler as amd
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.runtime import driver

from lightning_gqsgd import kernels
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import resolve, setting_of
from lightning_gqsgd.kernels import cuda
from lightning_gqsgd.kernels.cuda import launch, ptx, tiles
from lightning_gqsgd.kernels.cuda.constants import Constants
from lightning_gqsgd.presets import FIXED
from lightning_gqsgd.reducers import new_store
from lightning_gqsgd.wire.compiling import every_tile
from lightning_gqsgd.wire.plan import Plan

#: Messages that a reduction is counted for.
MESSAGES = 8
#: Virtual ranks whose step is compiled.
RANKS = 4


class Case(NamedTuple):
    """A configuration whose kernels are compiled for gradients of a dtype."""

    name: str
    config: GQSGDConfig
    dtype: torch.dtype = torch.float32


def default() -> list[Case]:
    """Returns the default configuration."""
    return [Case("gqsgd, fp32", FIXED["gqsgd"].config)]


def few() -> list[Case]:
    """Returns one case of each family of codes, and of the dtypes."""
    return [
        Case("gqsgd", FIXED["gqsgd"].config),
        Case("gqsgd_2bit, bf16", FIXED["gqsgd_2bit"].config, torch.bfloat16),
        Case("gqsgd_exponential", FIXED["gqsgd_exponential"].config),
        Case("gqsgd_trellis", FIXED["gqsgd_trellis"].config),
    ]


def refused() -> list[Case]:
    """Returns cases whose kernels a version of Triton would not compile, as they once were, after the front end."""
    sixteen = partial(GQSGDConfig, codec="linear", block_size=16)
    return [
        Case("3 bit, two shots", sixteen(bits=3, dither="stochastic", reducer="two_shot")),
        Case("6 bit, two shots", sixteen(bits=6, dither="stochastic", reducer="two_shot")),
        Case("6 bit, gather", sixteen(bits=6, reducer="gather")),
    ]


def table() -> list[Case]:
    """Returns the cases of the table: the default in both usual dtypes, half of its bits, and powers of two."""
    return [
        Case("gqsgd, fp32", FIXED["gqsgd"].config),
        Case("gqsgd, bf16", FIXED["gqsgd"].config, torch.bfloat16),
        Case("gqsgd_4bit, fp32", FIXED["gqsgd_4bit"].config),
        Case("gqsgd_exponential, fp32", FIXED["gqsgd_exponential"].config),
    ]


_TILES = {tiles.ALIGNED.value: "aligned", tiles.FULL.value: "full", tiles.RAGGED.value: "ragged"}

KERNELS: dict[str, Callable[[], list[Case]]] = {
    "default": default,
    "few": few,
    "refused": refused,
    "table": table,
}


@dataclass(frozen=True)
class Compiled:
    """What one kernel is compiled to, for one GPU.

    Attributes:
        case: name of the first case that needs it.
        kernel: name of the kernel.
        tiles: the kind of its tiles.
        arch: the GPU, e.g. 90.
        registers: of a thread.
        spills: bytes of a thread's local memory.
        instructions: per coordinate; of a reduction, per coordinate and message of `MESSAGES`.
        wide_loads, wide_stores: how many accesses of 16 bytes it has.
        narrow_loads: how many other loads of memory of the GPU it has.
        inexact: divisions and roots that are not rounded correctly.
        contracted: products and sums that became one, in encoding.
    """

    case: str
    kernel: str
    tiles: str
    arch: int
    registers: int
    spills: int
    instructions: float
    wide_loads: int
    wide_stores: int
    narrow_loads: int
    inexact: int
    contracted: int


def target_of(arch: str) -> GPUTarget:
    """Returns the target of a compute capability of NVIDIA, or of an architecture of AMD, e.g. gfx942."""
    if not is_of_amd(arch):
        return GPUTarget("cuda", int(arch), 32)
    # GPUs for data centres have warps of 64 threads, those for desks have 32.
    return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)


def is_of_amd(arch: str) -> bool:
    """Returns whether an architecture is one of AMD."""
    return arch.startswith("gfx")


class _NoCard:
    """As much of a driver as compiling asks for. The number of the device is what is compiled for."""

    def __init__(self) -> None:
        self.target = target_of("90")

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int | str:
        return self.target.arch

    def get_current_stream(self, device: int = 0) -> int:
        return 0


class _Understood(Exception):
    """Raised in place of all later stages of compiling: the kernel is a valid program."""


class Compiler:
    """Takes the place of `launch.start`: compiles each kernel once instead of running it.

    Args:
        counts: whether machine code is looked at.

    Attributes:
        case: what is being compiled.
        card: the GPU that is compiled for.
        found: what was compiled, if ``counts``.
        compiled: how many kernels were compiled.
        failed: by kernel, what the compiler said.
    """

    def __init__(self, *, counts: bool) -> None:
        self.case = ""
        self.card = _NoCard()
        self.found: list[Compiled] = []
        self.compiled = 0
        self.failed: dict[str, str] = {}
        self._counts = counts
        self._seen: set[Any] = set()

    def __call__(self, kernel: Any, c: Constants, programs: int, *arguments: Any, **constants: Any) -> None:
        kinds = tuple(one.dtype if isinstance(one, Tensor) else type(one) for one in arguments)
        identity = (
            self.card.target.arch,
            kernel.fn.__module__,
            kernel.fn.__name__,
            c,
            kinds,
            *map(str, constants.values()),
        )
        if not programs or identity in self._seen:
            return
        self._seen.add(identity)
        try:
            options = launch.options(c, constants.get("KIND"))
            made = kernel.warmup(*arguments, grid=(1,), c=c, **options, **constants)
        except _Understood:
            made = None
        except Exception as error:  # of any kind, from any version; all kernels are tried
            name = f"{self.case}: {kernel.fn.__name__} for {self.card.target.arch}"
            self.failed[name] = f"{type(error).__name__}: {str(error)[-600:]}"
            return
        self.compiled += 1
        if made is not None and self._counts:
            kind = _TILES.get(constants.get("KIND"), "any")
            self.found.append(self._looked_at(kernel.fn.__name__, kind, made, c))

    def _looked_at(self, name: str, kind: str, made: Any, c: Constants) -> Compiled:
        ptx = made.asm["ptx"]
        code = machine_code(made.asm["cubin"])
        each = 2 * c.shape.half * c.shape.rows / (32 * made.metadata.num_warps)
        count = code.executed(MESSAGES) / MESSAGES if name == "reduce_kernel" else code.executed(1)
        return Compiled(
            case=self.case,
            kernel=name.removesuffix("_kernel"),
            tiles=kind,
            arch=self.card.target.arch,
            registers=code.registers,
            spills=code.spills,
            instructions=round(count / each, 1),
            wide_loads=len(re.findall(r"ld\.global[\w.:]*\.v4", ptx)),
            wide_stores=len(re.findall(r"st\.global[\w.:]*\.v4", ptx)),
            narrow_loads=len(re.findall(r"ld\.global(?![\w.:]*\.v4)", ptx)),
            # Not ``rsqrt``, which `floats.positive_root` begins with.
            inexact=len(re.findall(r"div\.full|div\.approx|(?<!r)sqrt\.approx", ptx)),
            # Some contracted products are meant, and exact: those of the dither, in decoding and in companded encoding,
            # where `floats.positive_root` has two more after each reciprocal root, and `floats.divided_by_scale` has
            # four after a reciprocal.
            contracted=_contracted(ptx) if name == "encode_kernel" else 0,
        )


def _contracted(ptx: str) -> int:
    """Returns how many products and sums of an encoding became one without being meant to."""
    return ptx.count("fma.rn") - 3 * ptx.count("rsqrt.approx") - 4 * ptx.count("rcp.approx.ftz")


class MachineCode(NamedTuple):
    """The instructions of a kernel.

    Attributes:
        registers: of a thread.
        spills: bytes of a thread's local memory.
        addresses: of its instructions, up to the routines that it calls for rare numbers.
        loops: first and last address of each loop.
    """

    registers: int
    spills: int
    addresses: list[int]
    loops: list[tuple[int, int]]

    def executed(self, turns: int) -> int:
        """Returns how many instructions a thread executes whose loops take so many turns, and that skips none."""
        within = sum(any(first <= at <= last for first, last in self.loops) for at in self.addresses)
        return len(self.addresses) + (turns - 1) * within


def machine_code(cubin: bytes) -> MachineCode:
    """Returns the instructions of a compiled kernel, as NVIDIA's tools in Triton's package show them."""
    tools = Path(nvidia.__file__).parent / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output(tools / "cuobjdump", "-res-usage", file.name)
        listing = _output(tools / "cuobjdump", "-sass", file.name)
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", listing, re.MULTILINE)
    instructions = [(int(at, 16), text) for at, text in lines if "NOP" not in text]
    called = [int(to, 16) for _, text in instructions for to in re.findall(r"CALL\S* .*?0x([0-9a-f]+)", text)]
    end = min([to for to in called if to], default=1 << 60)
    main = [(at, text) for at, text in instructions if at < end]
    jumps = [(int(to, 16), at) for at, text in main for to in re.findall(r"BRA\S* .*?0x([0-9a-f]+)", text)]
    return MachineCode(
        registers=int(re.findall(r"REG:(\d+)", usage)[-1]),
        spills=int(re.findall(r"STACK:(\d+)", usage)[-1]) + int(re.findall(r"LOCAL:(\d+)", usage)[-1]),
        addresses=[at for at, _ in main],
        # The last instruction jumps to itself, and is never reached.
        loops=[(to, at) for to, at in jumps if to < at],
    )


def compile_cases(compiler: Compiler, cases: Iterable[Case]) -> None:
    """Compile what a step of virtual ranks launches, in each case."""
    for compiler.case, config, dtype in cases:
        resolved = resolve(config, RANKS)
        segments = every_tile(resolved.block_size, RANKS)
        numel = sum(segment.numel for segment in segments)
        sizes = {segment.parameter: segment.numel for segment in segments if not segment.raw}
        setting = setting_of(resolved, RANKS, dtype)
        stores = [new_store(setting, sizes, torch.device("cpu")) for _ in range(RANKS)]
        gradients = [torch.ones(numel, dtype=dtype) for _ in range(RANKS)]
        Plan(segments, setting).average(gradients, 0, stores)


def _output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _stop_early() -> None:
    """Let compiling end after Triton's own intermediate code, where versions of Triton differ most: a tenth of the
    time."""

    def understood(source: Any, metadata: Any) -> None:
        raise _Understood

    def stop(backend: Any) -> None:
        add = backend.add_stages

        def add_first(self: Any, stages: dict[str, Any], *arguments: Any) -> None:
            add(self, stages, *arguments)
            for name in [name for name in stages if name != "ttir"]:
                stages[name] = understood

        backend.add_stages = add_first

    stop(nvidia.CUDABackend)
    stop(amd.HIPBackend)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiling", description=__doc__.split("\n")[0])
    parser.add_argument("--kernels", choices=list(KERNELS), default="few")
    parser.add_argument(
        "--arch", nargs="+", default=["90"], help="compute capabilities, e.g. 80 90 100, or GPUs of AMD, e.g. gfx942"
    )
    parser.add_argument("--front", action="store_true", help="stop at Triton's intermediate code")
    parser.add_argument("--counts", action="store_true", help="look at the machine code")
    options = parser.parse_args()
    of_amd = {is_of_amd(arch) for arch in options.arch}
    if len(of_amd) > 1:
        parser.error(f"--arch {' '.join(options.arch)}: GPUs of NVIDIA and of AMD take a command each")
    if True in of_amd:
        if options.counts:
            parser.error("--counts knows the machine code of NVIDIA's GPUs only")
        ptx.AVAILABLE = tl.constexpr(False)  # as with a PyTorch that is built for AMD's
    if options.front:
        _stop_early()
    compiler = Compiler(counts=options.counts)
    driver.set_active(compiler.card)
    launch.start = compiler
    sys.modules[f"{kernels.__name__}.cpu"] = cuda  # so that plans of tensors on the CPU launch the kernels for GPUs
    for compiler.card.target in map(target_of, options.arch):
        compile_cases(compiler, KERNELS[options.kernels]())
    if not (compiler.compiled or compiler.failed):
        sys.exit("no kernel was launched: the plans have others")
    facts = {
        "triton": triton.__version__,
        "compiled": compiler.compiled,
        "failed": compiler.failed,
        "found": [asdict(one) for one in compiler.found],
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
