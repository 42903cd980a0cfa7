"""What ranks remember: conservation, agreement, independence of buckets, and faults."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.codecs.variance import omega_subtractive
from lightning_gqsgd.config import ConfigError, GQSGDConfig, Memory
from lightning_gqsgd.config.resolving import resolve, setting_of
from lightning_gqsgd.kernels.layout import USUAL_SIZE, PieceSize, Run, Segment, cut, owners, runs
from lightning_gqsgd.presets import FIXED, PRESETS
from lightning_gqsgd.reducers import new_store
from lightning_gqsgd.reducers.memory import Keeps, MemoryStore, StabilityWarning, kinds
from lightning_gqsgd.reducers.two_shot import TwoShot
from lightning_gqsgd.research.simulation import VirtualRanks
from lightning_gqsgd.session import checkpoint
from lightning_gqsgd.session.checkpoint import (
    check_memory,
    check_state,
    gathered_memory,
    memory_digest,
    say_what_is_missing,
    take_memory,
)
from lightning_gqsgd.session.parameters import Parameter
from lightning_gqsgd.wire.plan import Plan

SEGMENTS = [Segment(0, 5000, False), Segment(1, 300, True), Segment(2, 2300, False)]
NUMEL = 7600
CODED = torch.cat([torch.full((one.numel,), not one.raw) for one in SEGMENTS])
REMEMBERING = [name for name, preset in PRESETS.items() if preset.config.remembers]


def gradients(ranks: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + ranks)
    common = torch.randn(NUMEL, generator=generator)
    return [(common + torch.randn(NUMEL, generator=generator)).to(dtype) for _ in range(ranks)]


def remembered(store: MemoryStore | None, kind: str) -> Tensor:
    assert store is not None
    return torch.cat([store.row(kind, number) for number in (0, 2)])


def owned(ranks: VirtualRanks, kind: str) -> Tensor:
    """What the owners of shards keep, put together."""
    values = torch.zeros(NUMEL)
    blocks = torch.from_numpy(cut(SEGMENTS, ranks.config.block_size))
    for rank, store in enumerate(ranks.stores):
        mine = blocks[torch.from_numpy(owners(blocks.numpy(), len(ranks.stores), striped=True)) == rank]
        assert store is not None
        values += store.load(kind, runs(mine.numpy(), ranks.config.block_size), values)
        assert store.row(kind, 0).numel() < 5000
    return values[CODED]


def mean_reference(ranks: VirtualRanks) -> Tensor:
    """``up_mean``, which is the same everywhere, or kept by the owners."""
    if ranks.config.reducer == "two_shot":
        return owned(ranks, "up_mean")
    rows = [remembered(store, "up_mean") for store in ranks.stores]
    assert all(torch.equal(row, rows[0]) for row in rows)
    return rows[0]


def test_presets_remember_what_their_papers_say() -> None:
    assert {name: kinds(PRESETS[name].config.up, PRESETS[name].config.down) for name in REMEMBERING} == {
        "ecq_sgd": ["up_error"],
        "cd_adam": ["up_reference", "up_mean", "down_reference"],
        "comp_ams": ["up_error"],
        "diana": ["up_reference", "up_mean"],
        "artemis": ["up_reference", "up_mean"],
        "dore": ["up_reference", "up_mean", "down_error"],
        "wyner_ziv": ["shared_reference"],
        "signsgd_ef": ["up_error", "down_error"],
        "topk_ef": ["up_error"],
    }


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("preset", REMEMBERING)
def test_all_ranks_hold_the_same_bits_and_uncompressed_parameters_are_exact(preset: str, ranks: int) -> None:
    virtual = VirtualRanks(ranks, SEGMENTS, preset=preset)
    for step in range(4):
        given = gradients(ranks, step)
        results = virtual.average(given, step)
        assert all(torch.equal(results[0], one) for one in results)
        assert torch.allclose(results[0][~CODED], torch.stack(given).mean(0)[~CODED], atol=1e-6)


@pytest.mark.parametrize("preset", ["comp_ams", "topk_ef", "signsgd_ef"])
def test_error_feedback_loses_nothing(preset: str) -> None:
    """Σ results = Σ means - what the ranks still remember, on average over them, and the owners of shards."""
    ranks = VirtualRanks(3, SEGMENTS, preset=preset)
    given, sent = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(30):
        some = gradients(3, step)
        given += torch.stack(some).double().mean(0)
        sent += ranks.average(some, step)[0]
    left = torch.stack([remembered(store, "up_error") for store in ranks.stores]).double().mean(0)
    assert float(left.norm()) > 1
    if ranks.config.down is not None:
        left += owned(ranks, "down_error")
    assert torch.allclose((given - sent)[CODED], left, atol=1e-4)


@pytest.mark.parametrize(
    ("reducer", "fields"),
    [("gather", {}), ("two_shot", {}), ("sum", {"bits": 8, "levels": None, "norm": "max", "dither": "adaptive"})],
)
def test_receivers_keep_the_mean_of_all_references(reducer: str, fields: dict) -> None:
    ranks = VirtualRanks(3, SEGMENTS, preset="diana", reducer=reducer, **fields)
    for step in range(20):
        ranks.average(gradients(3, step), step)
    mean = torch.stack([remembered(store, "up_reference") for store in ranks.stores]).mean(0)
    assert torch.allclose(mean_reference(ranks), mean, atol=2e-6 * float(mean.abs().max()) + 1e-6)
    assert float(mean.norm()) > 1


@pytest.mark.slow
def test_references_follow_constant_gradients() -> None:
    """DIANA's point: with a reference, the error vanishes; without, it stays."""
    given = gradients(4, 0)
    mean = torch.stack(given).mean(0)
    for preset, down in (("diana", 0.02), ("cd_adam", 0.02)):
        ranks = VirtualRanks(4, SEGMENTS, preset=preset)
        errors = [float((ranks.average(given, step)[0] - mean).norm() / mean.norm()) for step in range(300)]
        assert errors[-1] < down * errors[0]
        assert errors[-1] < 0.01
    ranks = VirtualRanks(4, SEGMENTS, preset="diana", memory="none")
    errors = [float((ranks.average(given, step)[0] - mean).norm() / mean.norm()) for step in range(300)]
    assert errors[-1] > 0.5 * errors[0]


@pytest.mark.parametrize("preset", REMEMBERING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_results_do_not_depend_on_buckets(preset: str, dtype: torch.dtype) -> None:
    """The whole model at first, then parameters apart and in the other order, as DDP's rebuild does."""
    config = resolve(PRESETS[preset].config, 3)
    setting = setting_of(config, 3, dtype)
    sizes, device = {0: 5000, 2: 2300}, torch.device("cpu")
    results = []
    for rebuilt in (False, True):
        stores = [new_store(setting, sizes, device) for _ in range(3)]
        whole, first, last = Plan(SEGMENTS, setting), Plan(SEGMENTS[2:], setting), Plan(SEGMENTS[:2], setting)
        for step in range(4):
            xs = gradients(3, step, dtype)
            if step and rebuilt:
                first.average([x[5300:] for x in xs], step, stores)
                last.average([x[:5300] for x in xs], step, stores)
            else:
                whole.average(xs, step, stores)
            assert all(torch.equal(xs[0], x) for x in xs)
        results.append(xs[0])
    assert torch.equal(*results)


@pytest.mark.parametrize("preset", REMEMBERING)
def test_results_do_not_depend_on_pieces(preset: str) -> None:
    config = resolve(PRESETS[preset].config, 3)
    results = []
    for size in (USUAL_SIZE, PieceSize(700, 700)):
        setting = setting_of(config, 3, torch.float32, size)
        stores = [new_store(setting, {0: 5000, 2: 2300}, torch.device("cpu")) for _ in range(3)]
        plan = Plan(SEGMENTS, setting)
        for step in range(3):
            xs = gradients(3, step)
            plan.average(xs, step, stores)
        results.append(xs[0])
    assert torch.equal(*results)


@pytest.mark.parametrize("preset", REMEMBERING)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_step_with_a_bad_value_on_one_rank_leaves_no_trace_there(preset: str, bad: float) -> None:
    """As GradScaler needs it: such a step is skipped, and the next one is as if there had been none."""
    hit, spared = (VirtualRanks(3, SEGMENTS, preset=preset) for _ in range(2))
    for ranks in (hit, spared):
        ranks.average(gradients(3, 0), 0)
    broken = gradients(3, 1)
    broken[1][100] = bad
    result = hit.average(broken, 1)[0]
    blocks = ~result.isfinite()
    assert blocks[100]
    assert blocks[: hit.config.block_size].all()
    after = [ranks.average(gradients(3, 2), 2)[0] for ranks in (hit, spared)]
    assert torch.equal(after[0][blocks], after[1][blocks])
    assert after[0].isfinite().all()
    for kind in kinds(hit.config.up, hit.config.down):
        everything = [
            owned(ranks, kind) if ranks.config.reducer == "two_shot" and kind in ("up_mean", "down_error")
            else torch.stack([remembered(store, kind) for store in ranks.stores])
            for ranks in (hit, spared)
        ]  # fmt: skip
        assert everything[0].isfinite().all()
        assert torch.equal(*(values[..., blocks[CODED]] for values in everything))


def test_numbers_that_may_diverge_come_with_a_warning_and_the_one_that_works() -> None:
    base = {"dither": "stochastic", "bits": 4, "levels": 4, "norm": "l2", "reducer": "gather"}
    with pytest.warns(StabilityWarning, match=r"λ = .* up to 4 >= 1.*alpha=0.2 works"):
        resolve(GQSGDConfig(**base, memory={"alpha": 1, "beta": 1}), 4)
    with pytest.warns(StabilityWarning, match=r"rho=1 may diverge.*rho=0.2 works"):
        resolve(GQSGDConfig(**base, memory="ef21"), 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for memory in ("ecq", "diana", {"alpha": 0.2, "beta": 0.9}, "none"):
            resolve(GQSGDConfig(**base, memory=memory), 4)
        for preset in FIXED.values():
            resolve(preset.config, 4)


@pytest.mark.parametrize("memory", ["none", Memory(0.0, 0.7, 0.0)])
def test_a_memory_of_nothing_is_none(memory: str | Memory) -> None:
    config = resolve(GQSGDConfig(memory=memory), 3)
    assert config.memory == "none"
    assert kinds(config.up, config.down) == []
    with_it, without = (VirtualRanks(3, SEGMENTS, memory=one).average(gradients(3, 0), 0) for one in (memory, "auto"))
    assert torch.equal(with_it[0], without[0])


def test_numbers_that_are_left_out_come_from_the_codec() -> None:
    resolved = resolve(PRESETS["ecq_sgd"].config, 4)
    assert resolved.up == Memory(1 / 5, 1.0, 0.0)
    assert resolve(PRESETS["diana"].config, 4).up == Memory(0.0, 0.0, 1 / 34)
    # Codes that are added have fewer levels, under a scale of all ranks: ω is 85.3 for 8 ranks, and not 0.38.
    added = resolve(GQSGDConfig(reducer="sum", codec="linear", bits=4, memory="ecq"), 8)
    assert added.up is not None
    assert added.up.alpha == pytest.approx(1 / (1 + omega_subtractive(8 * 256, 2)))
    with pytest.warns(StabilityWarning, match="ω is up to 607"):
        resolve(GQSGDConfig(reducer="sum", codec="linear", bits=8, block_size=256, memory="ef"), 64)
    with pytest.raises(ConfigError, match="is biased; take 'ef' or 'ef21'"):
        resolve(GQSGDConfig(codec="sign", bits=1, memory="ecq", reducer="gather"), 4)
    with pytest.raises(ConfigError, match="depends on the parameter"):
        resolve(GQSGDConfig(dither="stochastic", scale_per="parameter", memory="ecq", reducer="gather"), 4)


@pytest.mark.parametrize(
    "fields",
    [{"reducer": "gather"}, {"reducer": "two_shot"}, {"reducer": "sum", "bits": 8}, {"memory_down": "none"}],
    ids=["gather", "two_shot", "sum", "no way back"],
)
def test_a_shared_reference_is_the_running_mean_of_what_all_ranks_end_with(fields: dict) -> None:
    ranks = VirtualRanks(3, SEGMENTS, preset="wyner_ziv", **fields)
    expected = torch.zeros(NUMEL)
    for step in range(6):
        results = ranks.average(gradients(3, step), step)
        expected = 0.9 * expected + 0.1 * results[0]
        for store in ranks.stores:
            assert torch.allclose(remembered(store, "shared_reference"), expected[CODED], atol=1e-6)
            assert torch.equal(*(remembered(each, "shared_reference") for each in (store, ranks.stores[0])))


def test_a_memory_follows_its_formulas() -> None:
    """u = x + α e - h;  e <- β e + (x - h - Q(u));  h <- h + ρ Q(u);  the receiver takes Q(u) + h."""
    alpha, beta, rho = 0.3, 0.8, 0.2
    fields: dict[str, Any] = {"bits": 4, "reducer": "gather"}
    ranks = VirtualRanks(1, SEGMENTS, **fields, memory={"alpha": alpha, "beta": beta, "rho": rho})
    without = VirtualRanks(1, SEGMENTS, **fields)
    e = torch.zeros(NUMEL)
    h = torch.zeros(NUMEL)
    for step in range(4):
        x = gradients(1, step)[0]
        sent = without.average([x + alpha * e - h], step)[0]
        result = ranks.average([x], step)[0]
        assert torch.allclose(result[CODED], (sent + h)[CODED], atol=1e-5)
        e = beta * e + (x - h - sent)
        h = h + rho * sent
        for kind, expected in (("up_error", e), ("up_reference", h), ("up_mean", h)):
            assert torch.allclose(remembered(ranks.stores[0], kind), expected[CODED], atol=1e-5)


@pytest.mark.parametrize("reducer", ["two_shot", "gather"])
@pytest.mark.parametrize("memory", ["ef", "diana", "shared"])
def test_a_memory_works_with_a_rotation(memory: str, reducer: str) -> None:
    ranks = VirtualRanks(3, SEGMENTS, torch.float32, bits=8, memory=memory, reducer=reducer, rotation=True)
    for step in range(8):
        xs = gradients(3, step)
        exact = torch.stack(xs).mean(0)
        assert float((ranks.mean(xs, step) - exact).norm() / exact.norm()) < 0.02


@pytest.mark.parametrize("fields", [{"memory": "ef"}, {"memory": "none", "memory_down": "ef"}], ids=str)
def test_owners_of_a_memory_have_stripes_in_either_direction(fields: dict[str, Any]) -> None:
    config = resolve(GQSGDConfig(bits=4, reducer="two_shot", block_size=16, **fields), 3)
    layout = TwoShot(cut(SEGMENTS, 16), setting_of(config, 3, torch.float32)).layout
    for rank in range(3):
        mine = layout.order[layout.first[rank] : layout.first[rank + 1]]
        assert (owners(layout.table, 3, striped=True)[mine] == rank).all()
        assert not (owners(layout.table, 3, striped=False)[mine] == rank).all()


def test_the_way_back_has_the_shared_reference_of_the_way_up() -> None:
    config = resolve(PRESETS["wyner_ziv"].config, 4)
    assert config.down == config.up == Memory(0.0, 0.9, 0.1, shared=True)
    assert kinds(config.up, config.down) == ["shared_reference"]
    assert "shared memory on the way back: beta 0.9, rho 0.1" in config.describe()
    assert resolve(PRESETS["wyner_ziv"].config, 2).down is None  # a gather has no way back


def test_a_shared_reference_as_plain_values() -> None:
    config = GQSGDConfig(memory={"shared": True, "rho": 0.2, "beta": 0.8})
    assert config.up == Memory(0.0, 0.8, 0.2, shared=True)
    assert GQSGDConfig(**config.to_dict()) == config
    assert GQSGDConfig(memory={"shared": True}).up == GQSGDConfig(memory="shared").up
    assert GQSGDConfig(memory={"alpha": 0.5}).to_dict()["memory"] == {"alpha": 0.5, "beta": 1.0, "rho": 0.0}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Memory(1.0, 1.0, 0.1, shared=True), "keeps no error; give alpha=0, not 1.0"),
        (lambda: Memory(0.0, 1.0, 0.1, shared=1), "shared=1 must be True or False"),  # type: ignore[arg-type]
        (lambda: GQSGDConfig(memory_down="shared"), "leave memory_down out, and give memory='shared'"),
        (lambda: GQSGDConfig(memory="diana", memory_down="shared"), "needs the same memory"),
    ],
)
def test_shared_references_that_cannot_work(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_shared_reference_that_may_amplify_its_noise_comes_with_a_warning() -> None:
    with pytest.warns(StabilityWarning, match=r"beta² \+ rho² θ is up to .* >= 1"):
        resolve(GQSGDConfig(codec="linear", bits=1, memory="shared"), 4)
    # Rounded on both ways, an average of two ranks has 3.6 times the noise of one message.
    with pytest.warns(StabilityWarning, match="is up to 1.15 >= 1"):
        resolve(GQSGDConfig(codec="linear", bits=2, dither="subtractive", memory="shared", reducer="two_shot"), 2)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda rows: rows.to("meta"), r"is .* and no floating-point tensor \[ranks, numel\] with values"),
        (lambda rows: rows.to_sparse(), r"is .* and no floating-point tensor \[ranks, numel\] with values"),
        (lambda rows: rows.int(), r"is .* and no floating-point tensor \[ranks, numel\] with values"),
        (lambda rows: torch.stack([rows[0], rows[1] * math.nan]), "has values that are not finite"),
        (lambda rows: rows.half() * math.inf, "has values that are not finite"),
        (lambda rows: torch.stack([rows[0], rows[1].double() * 1e300]), r"is torch.float64, .* beyond 3.403e\+38"),
    ],
)
def test_a_memory_without_numbers_is_refused_before_anything_is_taken(
    damage: Callable[[Tensor], Tensor], words: str
) -> None:
    config = resolve(PRESETS["signsgd_ef"].config, 2)
    store = new_store(setting_of(config, 2, torch.float32), {0: 64, 2: 64}, torch.device("cpu"))
    kept = [store.row(kind, 0).fill_(3.0) for kind in store.kinds]
    saved = {kind.value: {0: torch.ones(2, store.row(kind, 0).numel())} for kind in store.kinds}
    for tensors in saved.values():
        tensors[2] = damage(tensors[0])
    with pytest.raises(ConfigError, match=f"(?s)of parameter 2 {words}"):
        take_memory(store, {"memory": saved}, 0, 2)
    assert all(bool((row == 3).all()) for row in kept)


def test_memories_of_different_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="'up_error', 'up_mean' are of different parameters"):
        check_memory({"up_error": {0: torch.zeros(2, 3)}, "up_mean": {1: torch.zeros(2, 3)}})


def small_store() -> MemoryStore:
    """The errors of one parameter with three values."""
    return MemoryStore([Keeps.UP_ERROR], 256, 1, {0: 3}, torch.float32, torch.device("cpu"))


def test_each_rank_takes_its_own_memory_and_only_from_rank_0s_state() -> None:
    store = small_store()
    assert take_memory(store, {"memory": {"up_error": {0: torch.tensor([[1.0, 2, 3], [4, 5, 6]])}}}, 1, 2) == {0}
    assert store.row(Keeps.UP_ERROR, 0).tolist() == [4, 5, 6]
    with pytest.raises(ConfigError, match="not rank 0's"):
        take_memory(store, {"memory": None}, 1, 2)


@pytest.mark.parametrize(
    "state",
    [
        {},  # of a run without a memory
        {"memory": {"up_error": {0: torch.ones(3, 3)}}},  # of three ranks
        {"memory": {"up_reference": {0: torch.ones(2, 3)}}},  # of another preset
    ],
)
def test_a_memory_that_does_not_fit_leaves_an_empty_one(
    state: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    for step, said in ((0, 0), (3, 1)):  # before step 0 there is nothing to lose
        store = small_store()
        store.row(Keeps.UP_ERROR, 0).fill_(7)
        assert take_memory(store, {**state, "step": step}, 1, 2) is None
        assert not store.row(Keeps.UP_ERROR, 0).any()
        assert caplog.text.count("the memory starts empty") == said


BOTH = [Keeps.UP_ERROR, Keeps.UP_MEAN]


def stores_of(ranks: int, sizes: dict[int, int], blocks_of_a_piece: int = 1) -> list[MemoryStore]:
    """The memories of ranks that own shards. The value of each coordinate is its number, counted from 1."""
    block_size = 16
    stores = [MemoryStore(BOTH, block_size, ranks, sizes, torch.float32, torch.device("cpu")) for _ in range(ranks)]
    for number, size in sizes.items():
        blocks = cut([Segment(number, size, False)], block_size)
        owner = owners(blocks, ranks, striped=True)
        values = torch.arange(1.0, size + 1)
        for rank, store in enumerate(stores):
            for first in range(0, len(blocks), blocks_of_a_piece):
                piece = slice(first, first + blocks_of_a_piece)
                mine = runs(blocks[piece][owner[piece] == rank], block_size)
                store.store(Keeps.UP_MEAN, mine, values)
                assert torch.equal(store.load(Keeps.UP_MEAN, mine, values), _covered(mine, values) * values)
            store.store(Keeps.UP_ERROR, runs(blocks, block_size), values + 1000 * rank)
    return stores


def test_a_checkpoint_without_a_memory_has_no_owners_of_one(caplog: pytest.LogCaptureFixture) -> None:
    store = stores_of(2, {0: 40})[1]
    take_memory(store, {"step": 3}, 1, 2)
    assert "has that of no ranks (nothing), this run has 2 ranks (" in caplog.text
    assert "2 owners of blocks of 16)" in caplog.text


def _covered(mine: list[Run], values: Tensor) -> Tensor:
    covered = torch.zeros_like(values)
    for run in mine:
        for number in range(run.stretches):
            covered[run.start + number * run.stride :][: run.numel] = 1
    return covered


def whole_mean(stores: list[MemoryStore], number: int) -> list[float]:
    """What the owners keep of one parameter, put together."""
    return stores[0].whole(number, torch.stack([store.row(Keeps.UP_MEAN, number) for store in stores])).tolist()


@pytest.mark.parametrize("size", [1, 16, 100, 380, 635, 2000, 3333])
@pytest.mark.parametrize("ranks", [1, 3, 5])
@pytest.mark.parametrize("blocks_of_a_piece", [1, 45, 1000])  # pieces may be cut anywhere
def test_the_parts_of_all_owners_are_the_parameter(blocks_of_a_piece: int, ranks: int, size: int) -> None:
    stores = stores_of(ranks, {7: size}, blocks_of_a_piece)
    assert whole_mean(stores, 7) == list(range(1, size + 1))
    assert len({len(store.row(Keeps.UP_MEAN, 7)) for store in stores}) == 1


def test_parameters_with_other_numbers_keep_their_memory_whoever_owns_them_then() -> None:
    old = stores_of(3, {0: 500, 1: 700, 2: 90, 9: 40})
    sizes = {0: 500, 3: 700, 4: 90}
    moved = {9: 8, 2: 4, 1: 3, 0: 0, 5: 5}  # parameters 9 and 5 are not compressed here, or were not compressed there
    for rank in range(3):
        new = MemoryStore(BOTH, 16, 3, sizes, torch.float32, torch.device("cpu"))
        gathered: list[int] = []

        def gather(row: Tensor, gathered: list[int] = gathered) -> Tensor:
            gathered.append(len(row))
            number = {len(old[0].row(Keeps.UP_MEAN, number)): number for number in (1, 2)}[len(row)]
            return torch.stack([store.row(Keeps.UP_MEAN, number) for store in old])

        new.take_from(old[rank], moved, rank, gather)
        expected = stores_of(3, sizes)[rank]
        for number in sizes:
            for kind in BOTH:
                assert torch.equal(new.row(kind, number), expected.row(kind, number))
        # Every rank gathers the same parameters in the same order, and only those whose owners are others now.
        assert gathered == [len(old[0].row(Keeps.UP_MEAN, number)) for number in (1, 2)]


class Ranks:
    """A communicator of three ranks with equal tensors, as the first or the last of them sees it."""

    size = 3

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.gathered: list[int] = []

    def gather(self, tensor: Tensor, purpose: str) -> Tensor:
        self.gathered.append(tensor.numel())
        return torch.stack([tensor + 1000 * rank for rank in range(self.size)])


@pytest.mark.parametrize("rank", [0, 2])
def test_memories_of_all_ranks_are_gathered_in_parts(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "COORDINATES_AT_ONCE", 100)
    (store,) = stores_of(1, {0: 70, 4: 33})
    communicator = Ranks(rank)
    found = gathered_memory(communicator, store, [4, 0])  # type: ignore[arg-type]
    assert communicator.gathered == [33, 33, 4, 33] * len(BOTH)
    if rank:
        assert found is None
        return
    assert found is not None
    for kind in BOTH:
        for number in (0, 4):
            expected = torch.stack([store.row(kind, number) + 1000 * other for other in range(3)])
            assert torch.equal(found[kind.value][number], expected)


def test_a_layout_says_whether_ranks_keep_other_coordinates() -> None:
    def layout(kinds: list[Keeps], ranks: int) -> list[int]:
        return MemoryStore(kinds, 16, ranks, {}, torch.float32, torch.device("cpu")).layout

    assert layout(BOTH, 3) == [3, 16]
    assert layout([Keeps.UP_ERROR], 3) == [1, 0]
    assert layout(BOTH, 1) == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_memories_are_wide_and_may_change_if_a_state_was_saved_in_inference_mode(dtype: torch.dtype) -> None:
    store = MemoryStore(BOTH, 16, 1, {0: 3}, dtype, torch.device("cpu"))
    with torch.inference_mode():
        row = store.row(Keeps.UP_ERROR, 0)
    row.add_(1)
    assert row.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_copies_of_a_memory_stay_as_they_are_and_can_be_put_back() -> None:
    store = MemoryStore([*BOTH, Keeps.DOWN_ERROR], 16, 1, {0: 3, 1: 2}, torch.float32, torch.device("cpu"))
    errors = store.errors([0])
    rows = store.rows(0)
    for kind in store.kinds:
        for number in (0, 1):
            store.row(kind, number).fill_(7)
    store.put_back(errors)
    assert {kind: row.tolist() for kind, row in rows.items()} == dict.fromkeys(store.kinds, [0, 0, 0])
    now = {kind: [store.row(kind, number).tolist() for number in (0, 1)] for kind in store.kinds}
    assert now == {
        Keeps.UP_ERROR: [[0, 0, 0], [7, 7]],
        Keeps.DOWN_ERROR: [[0, 0, 0], [7, 7]],
        Keeps.UP_MEAN: [[7, 7, 7], [7, 7]],
    }
    store.forget(Keeps.UP_ERROR)
    assert not store.row(Keeps.UP_ERROR, 1).any()
    assert store.row(Keeps.UP_MEAN, 1).all()
    store.forget()
    assert not store.row(Keeps.UP_MEAN, 1).any()


def test_what_a_saved_memory_does_not_have_is_empty_and_a_wrong_size_changes_nothing() -> None:
    store = MemoryStore(BOTH, 16, 1, {0: 3, 1: 2}, torch.float32, torch.device("cpu"))
    for kind in BOTH:
        for number in (0, 1):
            store.row(kind, number).fill_(7)
    for wrong in ({0: torch.ones(1, 3), 1: torch.ones(1, 3)}, {0: torch.ones(1, 3), 5: torch.ones(1, 2)}):
        with pytest.raises(ConfigError, match="resume with the model and the configuration that wrote it"):
            store.take({kind.value: wrong for kind in BOTH}, 0)
        assert all(bool((store.row(kind, number) == 7).all()) for kind in BOTH for number in (0, 1))
    store.take({kind.value: {0: torch.ones(1, 3)} for kind in BOTH}, 0)
    assert [store.row(kind, number).tolist() for kind in BOTH for number in (0, 1)] == [[1, 1, 1], [0, 0]] * 2


def test_ranks_that_have_read_parts_of_a_memory_compare_its_name() -> None:
    parts = ({"memory_name": "step 3", "memory": {"up_error": {0: torch.full((2, 3), value)}}} for value in (1.0, 2.0))
    assert {memory_digest(part) for part in parts} == {"step 3"}


def test_only_compressed_parameters_are_said_to_have_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    trained = [Parameter(0, "a", 9, False), Parameter(1, "b", 1, True), Parameter(2, "c", 9, False)]
    say_what_is_missing(trained, {0})
    assert "the memory of parameter 'c' starts empty" in caplog.text


@pytest.mark.parametrize("layout", [{"memory_layout": 3}, {"memory_layout": [2]}, {"memory_layout": [2, -1]}])
def test_a_layout_of_a_memory_that_is_none_is_refused(layout: dict[str, Any]) -> None:
    config = GQSGDConfig(memory="diana", bits=4)
    state = {"schema": 1, "seed": 0, "step": 0, "config": config.to_dict(), **layout}
    with pytest.raises(ConfigError, match="'memory_layout' is .* numbers of owners and of coordinates in a block"):
        check_state(state, config)
