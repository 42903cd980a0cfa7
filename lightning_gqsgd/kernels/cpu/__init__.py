"""Fast kernels on the CPU: one pass over memory per stage, a block at a time in L1, without the GIL.

`protocol.Kernels` describes the functions and their arguments. Codes are the same as those of `reference`.

A kernel is composed of parts. Each part has its own file:

* `stages` converts tensors to the arguments of kernels.
* `blocks` has the loops over blocks.
* ``cpu`` in a family's folder in `codecs` has the functions of the family for one block, and `records` has the
  functions that families with a scale and codes of a fixed width share.
* `dither`, `rotation`, `packing`, `scales` and `loops` have the loops over coordinates. `casts` has single operations,
  and `vectors` has operations on vectors, for loops that LLVM does not vectorise.
* `narrow` rounds coordinates to bf16.
* `statistics` has largest magnitudes and sums of blocks.
* `jit` has the decorators that compile parts, and `cache` keeps compiled kernels on disk.
"""

from __future__ import annotations

from lightning_gqsgd.kernels.cpu.stages import (
    block_maxima,
    block_moments,
    combine,
    decode,
    decode_sum,
    encode,
    narrow,
    reduce,
    rotate,
)

__all__ = ["block_maxima", "block_moments", "combine", "decode", "decode_sum", "encode", "narrow", "reduce", "rotate"]
