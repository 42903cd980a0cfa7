"""What every configuration makes of given gradients, as digests in `golden.json`.

Configurations with `gather`, `sum`, `tree` or a memory have the digests of version 0.1. Later codecs have those that
they began with; those of trellis codes changed once, with the order of their coordinates. Results changed twice since:
with `two_shot` and no memory, owners have their own gradients exactly; and the presets `gqsgd` and `gqsgd_4bit` have
companded codes.

The gradients come from integer arithmetic, so they are the same on every machine and under every version of torch.
``python -m tests.golden.cases`` writes the file anew; do that only where results are meant to change, and say why in
the commit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.presets import FIXED
from lightning_gqsgd.research.simulation import VirtualRanks

FILE = Path(__file__).parent / "golden.json"
#: Compressed and uncompressed parameters, blocks that are cut short, one parameter that is mostly zero.
SEGMENTS = [Segment(0, 5000, False), Segment(1, 300, True), Segment(2, 2301, False), Segment(3, 17, False)]
NUMEL = sum(segment.numel for segment in SEGMENTS)
STEPS = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def gradients(ranks: int, step: int, dtype: torch.dtype) -> list[Tensor]:
    """One flat gradient per rank: [NUMEL], with values over several magnitudes and zeros in between."""
    k = torch.arange(NUMEL, dtype=torch.int64)
    found = []
    for rank in range(ranks):
        x = ((k * 2654435761 + 97 * rank + 31 * step) % 2**24 - 2**23).to(torch.float64) * 2.0**-23
        x = x * 2.0 ** -((k // 700) % 9).double()
        x[5300:6500] *= (k[5300:6500] % 7 == 0).double()
        found.append(x.to(dtype))
    return found


def cases() -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Name, number of ranks and configuration of every case."""
    for preset in FIXED:
        for dtype in DTYPES:
            for ranks in (2, 3, 5):
                yield f"{preset} {dtype} n={ranks}", ranks, {"preset": preset, "dtype": DTYPES[dtype]}
    for bits in range(1, 9):
        for dither in ("adaptive", "subtractive", "stochastic"):
            for reducer in ("two_shot", "gather", "sum"):
                if bits == 1 and (dither == "stochastic" or reducer == "sum"):
                    continue
                if reducer == "sum" and 2**bits - 1 < 3 * (2 if dither == "stochastic" else 1):
                    continue
                fields = {"bits": bits, "dither": dither, "reducer": reducer, "block_size": 64}
                yield f"linear {bits} {dither} {reducer}", 3, fields
    for norm in ("l2", "power_of_two"):
        for scale_per in ("block", "parameter"):
            fields = {"bits": 4, "norm": norm, "scale_per": scale_per, "clip": 2.0, "reducer": "two_shot"}
            yield f"norm {norm} {scale_per}", 3, fields
    for reducer in ("two_shot", "gather", "sum"):
        for dither in ("adaptive", "stochastic"):
            yield f"rotation {dither} {reducer}", 3, {"rotation": True, "dither": dither, "reducer": reducer}
    yield "rotation shared scale", 3, {"rotation": True, "scale": "global", "reducer": "gather"}
    for bits in (2, 5, 8):
        for mantissa in (0, 2):
            fields = {"codec": "exponential", "bits": bits, "mantissa": mantissa, "reducer": "two_shot"}
            yield f"exponential {bits} {mantissa}", 3, fields
    for memory in ("ef", "ecq", "diana", "ef21"):
        for down in ("none", "ef", "ef21"):
            fields = {"bits": 8, "dither": "stochastic", "memory": memory, "memory_down": down, "reducer": "two_shot"}
            yield f"memory {memory} {down}", 3, {**fields, "block_size": 16}
    nearest = {"dither": "nearest", "bits": 3, "memory": "ef", "rotation": True}
    yield "nearest, rotated, with memory", 3, {**nearest, "memory_down": "ef", "reducer": "two_shot"}
    yield "sum with memory", 3, {"reducer": "sum", "memory": "ef", "block_size": 16}
    for bits in (8, 4):
        yield f"hierarchical {bits}", 4, {"reducer": "hierarchical", "node_size": 2, "bits": bits}
        yield (
            f"hierarchical rotated {bits}",
            6,
            {
                **{"reducer": "hierarchical", "node_size": 2, "bits": bits},
                **{"rotation": True, "dither": "stochastic"},
            },
        )
    for bits in range(2, 9):
        for dither in ("adaptive", "subtractive"):
            for reducer in ("two_shot", "gather"):
                fields = {"codec": "companded", "bits": bits, "dither": dither, "reducer": reducer, "block_size": 64}
                yield f"companded {bits} {dither} {reducer}", 3, fields
    for dtype in DTYPES:
        fields = {"codec": "companded", "bits": 3, "block_size": 128, "dtype": DTYPES[dtype]}
        yield f"companded {dtype}", 5, fields
    fields = {"codec": "companded", "bits": 4, "reducer": "gather", "scale": "global", "norm": "l2", "clip": 2.0}
    yield "companded, shared scale", 3, fields
    yield "companded, hierarchical", 4, {"codec": "companded", "bits": 4, "reducer": "hierarchical", "node_size": 2}
    for bits in range(1, 5):
        for reducer in ("two_shot", "gather"):
            yield f"eden {bits} {reducer}", 3, {"codec": "eden", "bits": bits, "reducer": reducer}
    yield "eden, hierarchical", 4, {"codec": "eden", "bits": 3, "reducer": "hierarchical", "node_size": 2}
    for bits in range(1, 5):
        yield f"trellis {bits} two_shot", 3, {"codec": "trellis", "bits": bits, "reducer": "two_shot"}
    yield "native", 3, {"reducer": "native"}
    for norm, over in (("max", "l2"), ("l2", "l2"), ("max", "l1")):
        for reducer in ("sum", "gather"):
            fields = {"norm": norm, "norm_over_ranks": over, "scale": "global", "reducer": reducer}
            yield f"norm {norm} over ranks {over} {reducer}", 3, fields
    for reducer in ("sum", "two_shot", "gather"):
        yield f"norm per bucket {reducer}", 3, {"scale_per": "bucket", "reducer": reducer}


def digest(ranks: int, fields: dict[str, Any]) -> str:
    """Digest of what all ranks hold after each of some steps."""
    fields = dict(fields)
    dtype = fields.pop("dtype", torch.float32)
    preset = fields.pop("preset", None)
    fields = fields if preset else {"codec": "linear", "block_size": 256, **fields}
    virtual = VirtualRanks(ranks, SEGMENTS, dtype, preset, seed=11, **fields)
    found = hashlib.blake2b(digest_size=8)
    for step in range(STEPS):
        for mean in virtual.average(gradients(ranks, step, dtype), step):
            found.update(mean.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    """Write the file."""
    FILE.write_text(json.dumps({name: digest(ranks, fields) for name, ranks, fields in cases()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
