"""What codecs have in common: refusals, odd input, and what results depend on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_gqsgd.codecs import CompandedCodec, EdenCodec, LinearCodec, TrellisCodec
from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.config.choosing import choose_reducer
from lightning_gqsgd.kernels import cpu, reference
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.kernels.protocol import Coding
from lightning_gqsgd.research.simulation import average
from tests.errors import error_text
from tests.unit.test_kernels import BOTH, DITHERS, DTYPES, layout_of, new_codecs, there_and_back

#: Codecs with the shortest blocks that they are used with here.
SHORT_BLOCKS = [(CompandedCodec(4), 64), (EdenCodec(2), 128)]
OTHERS = [*((LinearCodec(4, dither), 64) for dither in DITHERS), *((codec, 64) for codec in new_codecs())]


@pytest.mark.parametrize("kernels", BOTH)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("codec", "size"), [*SHORT_BLOCKS, *OTHERS])
def test_non_finite_blocks_stay_so_and_touch_no_other(kernels, dtype: torch.dtype, bad: float, codec, size) -> None:
    x = torch.randn(3 * size + 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[size + 6] = bad
    y, count = there_and_back(kernels, x, codec.quantiser(size))
    assert count == 1
    assert y[size : 2 * size].isnan().all()
    assert y[:size].isfinite().all()
    assert y[2 * size :].isfinite().all()


#: The reference takes seconds for trellis codes. Their kernels for fp64 take long to compile.
KERNELS_OF_CODECS = [
    pytest.param(
        codec, kernels, dtype, marks=pytest.mark.slow if (codec, dtype) == (TrellisCodec, torch.float64) else ()
    )
    for codec, kinds in (
        (CompandedCodec, BOTH),
        (EdenCodec, BOTH),
        (TrellisCodec, [cpu]),
        *((type(new), BOTH) for new in new_codecs()),
    )
    for kernels in kinds
    for dtype in DTYPES
]


@pytest.mark.parametrize(("codec", "kernels", "dtype"), KERNELS_OF_CODECS)
@pytest.mark.parametrize("shape", ["spread", "constant", "one"])
def test_what_is_finite_stays_finite_at_both_ends_of_a_dtype(codec, kernels, dtype: torch.dtype, shape: str) -> None:
    line = torch.linspace(-1, 1, 512, dtype=torch.float64)
    pattern = {"spread": line, "constant": torch.ones(512).double(), "one": (line == 1).double()}[shape]
    for size in (torch.finfo(dtype).max, torch.finfo(dtype).tiny, torch.finfo(dtype).tiny * 2.0**-5):
        x = (pattern * size).to(dtype)
        for bits in codec.widths:
            y, bad = there_and_back(kernels, x, codec.of(bits).quantiser(256))
            assert bad == 0
            assert y.isfinite().all()


@pytest.mark.parametrize("codec", ["companded", "eden"])
def test_results_depend_on_seed_and_step_alone(codec: str) -> None:
    gradients = [torch.randn(3000, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    fields: dict[str, Any] = {"codec": codec, "bits": 3, "reducer": "two_shot"}
    first, again = (average(gradients, step=4, seed=9, **fields)[0] for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, average(gradients, step=5, seed=9, **fields)[0])
    assert not torch.equal(first, average(gradients, step=4, seed=8, **fields)[0])


#: Fields, and the largest relative error of one mean.
FITTING: dict[str, list[tuple[dict[str, Any], float]]] = {
    "companded": [
        ({"reducer": "two_shot"}, 0.1),
        ({"reducer": "gather"}, 0.1),
        ({"reducer": "gather", "scale": "global"}, 0.1),
        ({"reducer": "gather", "norm": "l2", "clip": 2.5, "scale_per": "parameter"}, 0.5),
        ({"reducer": "hierarchical", "node_size": 2}, 0.1),
        ({"reducer": "two_shot", "memory": "diana", "memory_down": "none"}, 0.1),
    ],
    "eden": [
        ({"reducer": "two_shot"}, 0.2),
        ({"reducer": "gather", "block_size": 1024}, 0.2),
        ({"reducer": "hierarchical", "node_size": 2}, 0.2),
        ({"reducer": "two_shot", "memory": "diana", "memory_down": "none"}, 0.2),
    ],
    "trellis": [({"reducer": "two_shot"}, 0.2), ({"reducer": "gather"}, 0.2)],
}
USUAL: dict[str, dict[str, int]] = {
    "companded": {"bits": 6, "block_size": 64},
    "eden": {"bits": 4},
    "trellis": {"bits": 4},
}


@pytest.mark.parametrize(
    ("codec", "fields", "most"), [(codec, *case) for codec, cases in FITTING.items() for case in cases]
)
def test_all_ranks_hold_the_same_bits_with_every_reducer_that_fits(codec: str, fields: dict, most: float) -> None:
    gradients = [torch.randn(3000, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    means = average(gradients, codec=codec, **{**USUAL[codec], **fields})
    assert all(torch.equal(means[0], mean) for mean in means[1:])
    exact = torch.stack(gradients).mean(0)
    assert float((means[0] - exact).norm() / exact.norm()) < most


REFUSED: dict[str, list[tuple[dict[str, Any], list[str]]]] = {
    "companded": [
        ({"bits": 1}, ["bits=2 to 8, not bits=1", "leave bits out"]),
        ({"dither": "stochastic"}, ["dither='stochastic'", "'adaptive' or 'subtractive'", "codec='linear'"]),
        ({"dither": "nearest"}, ["dither='nearest'", "'adaptive' or 'subtractive'"]),
        ({"levels": 3}, ["levels=3", "leave it out"]),
        ({"mantissa": 1}, ["mantissa=1", "leave it out"]),
        ({"reducer": "sum"}, ["reducer='sum'", "codec='companded'", "'two_shot' or 'gather'"]),
        ({"reducer": "tree"}, ["reducer='tree'", "codec='exponential'"]),
        ({"reducer": "gather", "coder": "elias"}, ["coder='elias'", "codec='linear'"]),
    ],
    "eden": [
        ({"bits": 5}, ["bits=1 to 4, not bits=5", "leave bits out"]),
        ({"rotation": True}, ["rotates every block itself", "rotation=False"]),
        ({"block_size": 64}, ["power of two of at least 128, not 64", "block_size=256"]),
        ({"block_size": 384}, ["power of two of at least 128, not 384"]),
        ({"dither": "nearest"}, ["dither='nearest'", "codec='eden'"]),
        ({"norm": "l2"}, ["norm='l2'", "codec='eden'", "leave it out"]),
        ({"clip": 2.5}, ["clip=2.5", "leave it out"]),
        ({"scale_per": "parameter"}, ["scale_per='parameter'", "leave it out"]),
        ({"scale": "global"}, ["scale", "codec='eden'", "'two_shot' or 'gather'"]),
        ({"levels": 3}, ["levels=3", "leave it out"]),
        ({"reducer": "sum"}, ["reducer='sum'", "codec='eden'", "'two_shot' or 'gather'"]),
        ({"reducer": "tree"}, ["reducer='tree'", "codec='exponential'"]),
        ({"reducer": "gather", "coder": "elias"}, ["coder='elias'", "codec='linear'"]),
    ],
    "trellis": [
        ({"bits": 5}, ["codec='trellis'", "bits=1 to 4, not bits=5", "leave bits out"]),
        ({"rotation": True}, ["codec='trellis'", "rotation=False"]),
        ({"block_size": 64}, ["codec='trellis'", "at least 128, not 64", "block_size=1024"]),
        ({"norm": "l2"}, ["norm='l2'", "codec='trellis'", "leave it out"]),
        ({"reducer": "sum"}, ["reducer='sum'", "codec='trellis'", "'two_shot' or 'gather'"]),
    ],
}


@pytest.mark.parametrize(
    ("codec", "fields", "words"), [(codec, *case) for codec, cases in REFUSED.items() for case in cases]
)
def test_a_configuration_that_cannot_work_is_refused_with_the_remedy(codec: str, fields: dict, words: list) -> None:
    text = error_text(ConfigError, GQSGDConfig, codec=codec, **fields)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(("codec", "size"), SHORT_BLOCKS)
def test_codes_are_never_added(codec, size: int) -> None:
    with pytest.raises(ConfigError, match="cannot be added over 4 ranks.*two_shot"):
        codec.quantiser(size, summed=4)
    q = codec.quantiser(size)
    blocks = layout_of([Segment(0, size, False)], q, torch.float32).blocks
    wire = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(NotImplementedError, match="cannot be added up"):
        cpu.decode_sum(wire, Coding(blocks, q), torch.zeros(size), [(1, 2)], torch.ones(1))


def test_auto_takes_a_reducer_that_adds_no_codes() -> None:
    for codec in ("companded", "eden"):
        assert choose_reducer(GQSGDConfig(codec=codec), 2) == "gather"
        assert choose_reducer(GQSGDConfig(codec=codec), 8) == "two_shot"
    assert choose_reducer(GQSGDConfig(codec="companded", scale="global"), 8) == "gather"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"codec": "companded", "bits": 3}, "3 bits (companded, adaptive dither, blocks of 128)"),
        ({"codec": "eden"}, "2 bits (eden, blocks of 256)"),
        ({"codec": "trellis"}, "2 bits (trellis, blocks of 1024)"),
    ],
)
def test_a_description_names_the_codec_and_its_dither(fields: dict, words: str) -> None:
    assert GQSGDConfig(**fields).describe() == words


@pytest.mark.parametrize(("codec", "size"), [(CompandedCodec(4), 64), (EdenCodec(4), 128)])
def test_the_reference_is_what_other_devices_run(codec, size: int) -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    q = codec.quantiser(size)
    assert torch.equal(there_and_back(reference, x, q)[0], there_and_back(cpu, x, q)[0])
