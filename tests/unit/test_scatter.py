"""The reduce-scatter on virtual ranks: its result is that of a gather, but for owners, who have their own gradients.

With two levels, it is the reduce-scatter of the means of nodes.
"""

import math

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.codecs import LinearCodec
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import setting_of
from lightning_gqsgd.kernels.layout import PIECE_NUMEL, PieceSize, Segment
from lightning_gqsgd.reducers import REDUCERS
from lightning_gqsgd.reducers.hierarchical import mean_of_rows
from lightning_gqsgd.wire.plan import GatherPlan, Plan, ScatterPlan

REPEATS = 400


def rows(sizes: list[int], ranks: int, raw: tuple[int, ...] = ()) -> list[Segment]:
    """Shards of parameters of these sizes, a row for each rank."""
    return [
        Segment(number * ranks + rank, size, number in raw)
        for rank in range(ranks)
        for number, size in enumerate(sizes)
    ]


def reduced(
    plan: type[Plan], gradients: list[Tensor], segments: list[Segment], step: int = 0, **fields
) -> list[Tensor]:
    """What each rank holds of its own part afterwards."""
    ranks, results = len(gradients), [one.clone() for one in gradients]
    config = GQSGDConfig(**{"reducer": "gather", **fields})
    plan(segments, setting_of(config, ranks, results[0].dtype)).average(results, step, [None] * ranks)
    return [result.view(ranks, -1)[rank] for rank, result in enumerate(results)]


def gathered_with_exact_parts(gradients: list[Tensor], segments: list[Segment], **fields) -> list[Tensor]:
    """What a gather leaves of each rank's own part, with the rank's gradient in the place of its message.

    What the message adds to the mean is what a gather makes of it where all other gradients are zero.
    """
    ranks = len(gradients)
    means = reduced(Plan, gradients, segments, **fields)
    for rank, gradient in enumerate(gradients):
        alone = [gradient if other == rank else torch.zeros_like(gradient) for other in range(ranks)]
        message = reduced(Plan, alone, segments, **fields)[rank]
        exact = gradient.view(ranks, -1)[rank].to(message.dtype) / ranks
        means[rank] = means[rank] - message + exact
    return means


def are_close(some: list[Tensor], others: list[Tensor]) -> bool:
    """Whether tensors differ by roundings of their dtype only, among numbers of at most 1."""
    allowed = 8 * torch.finfo(some[0].dtype).eps
    return all(
        float((x.double() - y.double()).abs().sum()) <= allowed * x.numel() for x, y in zip(some, others, strict=True)
    )


def gaussian(ranks: int, numel: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(ranks)]


#: Every dtype at three ranks, and every number of ranks in fp32.
CASES = [
    pytest.param(ranks, dtype, marks=[] if ranks == 3 or dtype == torch.float32 else pytest.mark.slow)
    for ranks in (1, 2, 3, 4)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
]


@pytest.mark.parametrize(("ranks", "dtype"), CASES)
def test_equal_to_a_gather(ranks: int, dtype: torch.dtype) -> None:
    for sizes in ([0], [1], [7, 0, 256], [300, 257, 1000, 2]):
        segments = rows(sizes, ranks, raw=(1,))
        gradients = gaussian(ranks, ranks * sum(sizes), dtype)
        for fields in ({}, {"bits": 3, "dither": "stochastic"}, {"rotation": True}, {"codec": "exponential"}):
            ours = reduced(ScatterPlan, gradients, segments, **fields)
            theirs = gathered_with_exact_parts(gradients, segments, **fields)
            assert are_close(ours, theirs)


@pytest.mark.parametrize("fields", [{}, {"scale_per": "parameter"}, {"rotation": True}])
def test_several_pieces(fields: dict) -> None:
    segments = rows([PIECE_NUMEL // 2 + 5, 3, PIECE_NUMEL], 2)
    gradients = gaussian(2, 2 * (PIECE_NUMEL // 2 + 8 + PIECE_NUMEL))
    setting = setting_of(GQSGDConfig(reducer="gather", **fields), 2, torch.float32)
    assert len(ScatterPlan(segments, setting)._pieces) == (2 if "scale_per" in fields else 4)
    ours = reduced(ScatterPlan, gradients, segments, **fields)
    assert are_close(ours, gathered_with_exact_parts(gradients, segments, **fields))


def test_bytes() -> None:
    """A rank sends the other three their parts: 1.5 pieces of codes, 2 bytes of scale for each block of 128."""
    plan = ScatterPlan(
        rows([PIECE_NUMEL // 4, PIECE_NUMEL // 8], 4),
        setting_of(GQSGDConfig(bits=4, reducer="two_shot"), 4, torch.float32),
    )
    expected = 3 * PIECE_NUMEL // 2 * (4 / 8 + 2 / 128)
    assert plan.message_bytes == expected
    assert plan.sent_bytes == expected * 3 / 4


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_values_reach_the_owner_of_their_block(bad: float) -> None:
    gradients = gaussian(3, 3000)
    gradients[2][1300] = bad  # in the part of rank 1
    for raw in ((), (0,)):
        first, second, third = reduced(ScatterPlan, gradients, rows([1000], 3, raw))
        assert not second[300].isfinite()
        assert second[:256].isfinite().all()
        assert first.isfinite().all()
        assert third.isfinite().all()


@pytest.mark.parametrize("dither", ["subtractive", "stochastic"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_error_is_as_predicted(ranks: int, dither: str) -> None:
    """With equal scales everywhere: uniform coordinates and, in each block, one at the maximum on all ranks."""
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.rand(1 << 17, generator=generator) * 2 - 1 for _ in range(ranks)]
    for one in gradients:
        one[::256] = 1.0
    mean = torch.stack([one.double() for one in gradients]).mean(0)
    squares = []
    for step in range(4):
        parts = reduced(ScatterPlan, gradients, rows([(1 << 17) // ranks], ranks), step, codec="linear", dither=dither)
        squares.append((torch.cat(parts).double() - mean).square().mean())
    predicted = REDUCERS["gather"].mean_error(LinearCodec(8, dither), ranks) * (ranks - 1) / ranks
    assert float(torch.stack(squares).mean()) == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize(
    "dither", ["adaptive", *(pytest.param(name, marks=pytest.mark.slow) for name in ("subtractive", "stochastic"))]
)
def test_unbiased(dither: str) -> None:
    gradients = gaussian(3, 3072)
    gradients[0][1024:] *= torch.rand(2048, generator=torch.Generator().manual_seed(0)) < 0.1  # partly sparse
    mean = torch.stack([one.double() for one in gradients]).mean(0)
    total, squares = torch.zeros_like(mean), torch.zeros_like(mean)
    for step in range(REPEATS):
        parts = reduced(ScatterPlan, gradients, rows([700, 324], 3), step, bits=5, dither=dither)
        error = torch.cat(parts).double() - mean
        total += error
        squares += error.square()
    of_mean, of_one = float((total / REPEATS).norm()), math.sqrt(float(squares.sum()) / REPEATS)
    assert of_mean < 1.3 * of_one / math.sqrt(REPEATS)
    z = ((total / REPEATS) / (squares / REPEATS / REPEATS).sqrt())[squares > 0]
    assert abs(float(z.mean())) * math.sqrt(z.numel()) < 4


def of_nodes(gradients: list[Tensor], nodes: int) -> list[Tensor]:
    """The mean of each node's gradients, in rank order and rounded to their dtype, as the levels compute it."""
    size = len(gradients) // nodes
    return [mean_of_rows(torch.stack(gradients[node * size : (node + 1) * size])) for node in range(nodes)]


def of_peers(flat: list, ranks: int, place: int, size: int) -> list:
    """The segments of the shards that the peers of a place own, in rank order."""
    each = len(flat) // ranks
    return [segment for rank in range(place, ranks, size) for segment in flat[rank * each : (rank + 1) * each]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("nodes", "size"), [(2, 2), (3, 2), (2, 3)])
def test_two_levels_are_a_reduce_scatter_of_the_means_of_nodes(nodes: int, size: int, dtype: torch.dtype) -> None:
    ranks = nodes * size
    for sizes in ([1], [7, 0, 256], [300, 257, 1000, 2]):
        segments = rows(sizes, ranks, raw=(1,))
        gradients = gaussian(ranks, ranks * sum(sizes), dtype)
        means = of_nodes(gradients, nodes)
        for fields in ({"bits": 4}, {"bits": 3, "dither": "stochastic"}, {"bits": 2, "codec": "eden"}):
            ours = reduced(ScatterPlan, gradients, segments, reducer="hierarchical", node_size=size, **fields)
            for place in range(size):
                shards = [mean.view(ranks, -1)[place::size].reshape(-1) for mean in means]
                own = of_peers(segments, ranks, place, size)
                expected = reduced(ScatterPlan, shards, own, reducer="two_shot", **fields)
                assert all(torch.equal(x, y) for x, y in zip(ours[place::size], expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ScatterPlan, {}),
        (ScatterPlan, {"rotation": True, "norm": "l2"}),  # rotates a copy
        (ScatterPlan, {"reducer": "hierarchical", "node_size": 2}),
        (GatherPlan, {}),
        (GatherPlan, {"rotation": True, "norm": "l2"}),
    ],
)
def test_pieces_have_the_bits_of_parameters_alone(kind: type[Plan], fields: dict, dtype: torch.dtype) -> None:
    """The second of three parameters has another number of bits, and each is cut into several pieces."""
    sizes, ranks = [5000, 3001, 7], 4
    configs = [GQSGDConfig(**{"reducer": "two_shot", "bits": bits, **fields}) for bits in (4, 8)]
    small = PieceSize(2048, 2048)
    settings = [setting_of(config, ranks, dtype, small) for config in configs]
    segments = [segment._replace(choice=number % 3 % 2) for number, segment in enumerate(rows(sizes, ranks))]
    gradients = gaussian(ranks, ranks * sum(sizes), dtype)
    together = [one.clone() for one in gradients]
    plan = kind(segments, *settings)
    assert len(plan._pieces) > 6
    plan.average(together, 0, [None] * ranks)
    end = 0
    for number, size in enumerate(sizes):
        columns = slice(end, end + size)
        end = columns.stop
        alone = [one.view(ranks, -1)[:, columns].reshape(-1) for one in gradients]
        at_once = setting_of(configs[number % 2], ranks, dtype, PieceSize(1 << 30, 1 << 30))
        kind([s._replace(choice=0) for s in segments[number :: len(sizes)]], at_once).average(alone, 0, [None] * ranks)
        for rank in range(ranks):
            known = slice(rank, rank + 1) if kind is ScatterPlan else slice(None)
            expected = alone[rank].view(ranks, -1)[known]
            assert torch.equal(together[rank].view(ranks, -1)[known, columns], expected)


def test_bytes_of_two_levels() -> None:
    """Between nodes, a rank sends the shard of its one peer: a quarter of a piece of codes. Inside its node, it sends
    half of the piece in fp32."""
    config = GQSGDConfig(bits=4, reducer="hierarchical", node_size=2)
    plan = ScatterPlan(rows([PIECE_NUMEL // 4], 4), setting_of(config, 4, torch.float32))
    codes = PIECE_NUMEL // 4 * (4 / 8 + 2 / 128)
    assert plan.message_bytes == 2 * codes
    assert plan.sent_bytes == PIECE_NUMEL // 2 * 4 + codes


def test_the_error_of_two_levels_is_that_of_two_nodes() -> None:
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.rand(1 << 17, generator=generator) * 2 - 1 for _ in range(4)]
    for one in gradients:
        one[::256] = 1.0
    mean = torch.stack([one.double() for one in gradients]).mean(0)
    fields = {"reducer": "hierarchical", "node_size": 2, "codec": "linear", "dither": "subtractive"}
    squares, total = [], torch.zeros_like(mean)
    for step in range(16):
        parts = reduced(ScatterPlan, gradients, rows([(1 << 17) // 4], 4), step, **fields)
        error = torch.cat(parts).double() - mean
        total += error
        squares.append(error.square().mean())
    of_two = REDUCERS["gather"].mean_error(LinearCodec(8, "subtractive"), 2) / 2
    assert float(torch.stack(squares).mean()) == pytest.approx(of_two, rel=0.05)
    assert float((total / 16).square().mean()) < 1.2 * of_two / 16  # unbiased


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_values_reach_their_owner_through_two_levels(bad: float) -> None:
    gradients = gaussian(4, 4000)
    gradients[3][1300] = bad  # in the part of rank 1
    parts = reduced(ScatterPlan, gradients, rows([1000], 4), reducer="hierarchical", node_size=2, bits=4)
    assert not parts[1][300].isfinite()
    assert all(part.isfinite().all() for part in (parts[0], parts[2], parts[3], parts[1][:256]))
