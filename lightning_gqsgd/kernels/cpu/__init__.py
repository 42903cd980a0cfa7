"""Fast kernels on the CPU: one pass over memory per stage, a block at a time in L1, without the GIL.

The functions and their arguments are those of `protocol.Kernels`. The codes are those of `reference`.

A kernel is put together of parts, with one file for each:

* `stages` turns tensors into the arguments of kernels.
* `blocks` has the loops over blocks.
* ``cpu`` in a family's folder in `codecs` has what the family does to one block, and `records` has what the families
  with a scale and a dither share.
* `dither`, `rotation`, `packing`, `scales` and `loops` have the loops over coordinates. `casts` has single operations,
  and `vectors` has operations on vectors, for loops that LLVM does not vectorise.
* `narrow` rounds coordinates to bf16.
* `statistics` has largest magnitudes and sums of blocks.
* `jit` says how parts are compiled, and `cache` keeps compiled kernels.
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
