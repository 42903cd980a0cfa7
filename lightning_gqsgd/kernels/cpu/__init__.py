"""Fast kernels on the CPU: one pass over memory per stage, a block at a time in L1, without the GIL.

The functions and their arguments are those of `protocol.Kernels`. The codes are those of `reference`.

A kernel is put together of parts with one file each. `stages` turns tensors into the arguments of kernels; `blocks` has
the loops over blocks; `linear`, `exponential` and `top_k` have what each family of codes does to one block; `records`
has what the families with a scale share; `dither`, `rotation`, `packing`, `scales` and `loops` have the loops over
coordinates; `jit` and `cache` say how parts are compiled and kept. `elias` has the entropy coder.
"""

from __future__ import annotations

from lightning_gqsgd.kernels.cpu.stages import (
    block_maxima,
    block_moments,
    combine,
    decode,
    decode_sum,
    encode,
    reduce,
    rotate,
)

__all__ = ["block_maxima", "block_moments", "combine", "decode", "decode_sum", "encode", "reduce", "rotate"]
