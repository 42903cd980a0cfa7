"""Rounds, fragments and presets of local steps, without processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.local_steps.choosing import make_local
from lightning_gqsgd.local_steps.fragments import Bundle, Entry, Fragment, fragments_of
from lightning_gqsgd.local_steps.options import LocalOptions
from lightning_gqsgd.local_steps.outer import describe_outer, load_outer, make_outer
from lightning_gqsgd.local_steps.rules import parse_rule
from lightning_gqsgd.local_steps.schedule import Rounds
from lightning_gqsgd.local_steps.starting import check_anchor_device
from lightning_gqsgd.presets import LOCAL_PRESETS


def starts_of(options: LocalOptions, steps: int) -> list[list[int]]:
    """The fragments that are due after each step."""
    rounds, starts = Rounds(options), []
    for step in range(1, steps + 1):
        starts.append(rounds.due_after(step))
        rounds.end_step(step)
    return starts


def test_one_fragment_is_averaged_after_the_last_step_of_a_round() -> None:
    assert starts_of(LocalOptions(every=3), 7) == [[], [], [0], [], [], [0], []]
    assert starts_of(LocalOptions(every=1), 2) == [[0], [0]]


def test_fragments_are_spread_over_a_round() -> None:
    assert starts_of(LocalOptions(every=6, fragments=3), 8) == [[], [0], [], [1], [], [2], [], [0]]
    assert starts_of(LocalOptions(every=2, fragments=4), 3) == [[0, 1], [2, 3], [0, 1]]
    for every in range(1, 20):
        for fragments in range(1, 8):
            due = starts_of(LocalOptions(every=every, fragments=fragments), 3 * every)
            assert sorted(sum(due[:every], [])) == list(range(fragments))
            assert due == due[:every] * 3


def test_rounds_may_grow_and_are_cut_off_by_a_last_average() -> None:
    options = LocalOptions(every=lambda number: number + 1)
    assert starts_of(options, 6) == [[0], [], [0], [], [], [0]]
    rounds = Rounds(LocalOptions(every=4))
    rounds.end_step(1)
    rounds.begin_anew(1)
    assert [rounds.due_after(step) for step in (4, 5)] == [[], [0]]


@pytest.mark.parametrize(
    ("every", "words"),
    [(32, "32 steps"), ("2min", "120 s"), (lambda number: min(8 * 2**number, 64), "8, 16, 32, ... steps")],
)
def test_the_length_of_rounds_in_words(every: Any, words: str) -> None:
    assert LocalOptions(every=every).every_in_words() == words


@pytest.mark.parametrize("fields", [{"every": "1s"}, {"elastic": True}])
def test_merges_mix_nothing(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="mixing=0.2: with .* leave mixing out"):
        LocalOptions(mixing=0.2, **fields)


def test_numbers_of_numpy_are_numbers() -> None:
    options = LocalOptions(every=np.int64(6), outer_after=np.int32(3), fragments=np.int8(2), delay=np.uint8(1))
    numbers = (options.every, options.outer_after, options.fragments, options.delay)
    assert [type(number) for number in numbers] == [int] * 4
    assert LocalOptions(every=lambda number: np.int64(4 + number)).steps_of_round(2) == 6
    assert type(LocalOptions(elastic=True, min_replicas=np.int64(2)).min_replicas) is int
    assert type(parse_rule({"name": "multi_step", "messages": np.int64(8)}).most_requests) is int


def test_a_round_that_was_longer_in_the_run_that_is_resumed_ends_with_the_next_step() -> None:
    rounds = Rounds(LocalOptions(every=8))
    rounds.load_state_dict({"number": 2, "begun_after": 64}, step=84)  # 20 steps into a round of 32
    assert rounds.due_after(85) == [0]
    rounds.end_step(85)
    assert [step for step in range(86, 102) if rounds.due_after(step)] == [93]
    rounds.load_state_dict({"number": 2, "begun_after": 64}, step=70)  # not yet
    assert [step for step in range(71, 80) if rounds.due_after(step)] == [72]


@pytest.mark.parametrize("every", [0, -1, 2.5, True, lambda number: 3 - number])
def test_a_number_of_steps_that_is_none(every: object) -> None:
    with pytest.raises(ConfigError, match="every"):
        starts_of(LocalOptions(every=every), 9)  # type: ignore[arg-type]


def entries(sizes: list[int], dtype: torch.dtype = torch.float32) -> list[Entry]:
    """Parameters of these sizes."""
    return [
        Entry(Segment(number, size, False), f"p{number}", torch.zeros(size, dtype=dtype), False)
        for number, size in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([4, 4, 4, 4], [[0, 1], [2, 3]]),
        ([100, 1, 1, 1], [[0], [1, 2, 3]]),
        ([1, 1, 1, 100], [[0, 1, 2], [3]]),
        ([100, 1, 1], [[0], [1], [2]]),
        ([1, 1, 100], [[0], [1], [2]]),
        ([5, 3, 4, 4, 2, 6], [[0, 1], [2, 3], [4, 5]]),
    ],
)
def test_fragments_are_consecutive_of_about_equal_size_and_never_empty(
    sizes: list[int], parts: list[list[int]]
) -> None:
    fragments = fragments_of(entries(sizes), [], LocalOptions(fragments=len(parts)))
    assert [[entry.segment.parameter for entry, _ in fragment.entries()] for fragment in fragments] == parts


def test_buffers_go_with_the_last_fragment_and_dtypes_travel_apart() -> None:
    buffer = Entry(Segment(9, 3, True), "mean", torch.zeros(3, dtype=torch.float64), True)
    fragments = fragments_of(entries([4, 4]), [buffer], LocalOptions(fragments=2))
    assert [[len(bundle.entries) for bundle in fragment.bundles] for fragment in fragments] == [[1], [1, 1]]


def test_the_change_of_sixteen_bit_parameters_is_that_since_the_anchor_was_rounded() -> None:
    options = LocalOptions()
    (entry,) = entries([4], torch.bfloat16)
    fragment = Fragment([entry], options)
    (bundle,) = fragment.bundles
    bundle.anchors[0].copy_(torch.tensor([1.001, 2.003, -3.01, 0.1]))  # what no bf16 number is
    fragment.set_tensors()
    assert bundle.change().dtype == torch.float32
    assert torch.equal(bundle.change(), torch.zeros(4))
    entry.tensor.sub_(0.5)
    assert torch.allclose(bundle.change(), torch.full((4,), 0.5), atol=0.02)
    assert bundle.anchors[0].dtype == torch.float32


def test_the_anchor_may_have_a_dtype_of_its_own() -> None:
    bundle = Bundle(entries([4]), LocalOptions(anchor_dtype=torch.bfloat16, anchor_device="cpu"))
    assert bundle.anchors[0].dtype == torch.bfloat16


def test_buffers_are_not_rounded_to_the_anchors_dtype() -> None:
    table = torch.arange(1000.0) + 1e5  # more than float16 holds, and no bf16 numbers
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        buffer = table.clone()
        tensors = [*entries([5]), Entry(Segment(1, 1000, True), "table", buffer, True)]
        fragment = Fragment(tensors, LocalOptions(anchor_dtype=dtype))
        (bundle,) = fragment.bundles
        fragment.set_tensors()
        assert torch.equal(buffer, table)
        assert not bundle.change().any()
        assert bundle.anchors[0].dtype == dtype
        assert bundle.anchors[1].dtype == torch.promote_types(dtype, torch.float32)
        assert torch.equal(bundle.flat_anchors(), torch.cat([torch.zeros(5), table]))
        bundle.anchors[1].data = bundle.anchors[1] + 1  # as an outer optimizer that replaces the memory
        assert torch.equal(bundle.flat_anchors()[5:], table + 1)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"anchor_dtype": torch.int8}, "anchor_dtype=torch.int8 is not one of torch.float32"),
        ({"anchor_dtype": torch.float8_e4m3fn}, "anchor_dtype=torch.float8_e4m3fn is not one of"),
        ({"anchor_dtype": "bf16"}, "anchor_dtype='bf16' is not one of"),
        ({"anchor_device": "nope"}, "anchor_device='nope' is not a device"),
        ({"anchor_device": 3.5}, "anchor_device=3.5 is not a device"),
        ({"anchor_device": "meta"}, "anchor_device='meta' has no memory"),
    ],
)
def test_an_anchor_that_cannot_be_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LocalOptions(**fields)


def test_a_device_of_anchors_that_is_not_here_is_refused_at_the_start() -> None:
    options = LocalOptions(anchor_device="cuda:99")
    with pytest.raises(ConfigError, match="anchor_device='cuda:99' is not here"):
        check_anchor_device(options.anchor_device)
    check_anchor_device("cpu")
    check_anchor_device(None)


def test_an_anchor_that_cannot_hold_a_parameter_is_refused() -> None:
    for value in (65504.0, torch.inf):  # what float16 holds, and what is infinite anyway
        (entry,) = entries([4])
        entry.tensor.detach()[2] = value
        Bundle([entry], LocalOptions(anchor_dtype=torch.float16))
    (entry,) = entries([4])
    entry.tensor.detach()[2] = -1e5
    with pytest.raises(ConfigError, match="float16 holds numbers up to 65504, and .* has 100000; take torch.bfloat16"):
        Bundle([entry], LocalOptions(anchor_dtype=torch.float16))


def test_the_outer_optimizer_begins_after_some_steps_of_plain_means() -> None:
    assert [LocalOptions(outer=outer).outer_after for outer in ("nesterov", "sgd", "heavy_ball")] == [256, 0, 0]
    assert LocalOptions(outer=partial(torch.optim.SGD, lr=0.5)).outer_after == 0
    options = LocalOptions(outer_after=3)
    assert [options.leaves_outer_out(step) for step in (1, 3, 4)] == [True, True, False]
    for value, text in ((-1, "outer_after=-1"), (1.5, "outer_after=1.5"), (True, "outer_after=True")):
        with pytest.raises(ConfigError, match=text):
            LocalOptions(outer_after=value)  # type: ignore[arg-type]


def test_a_momentum_that_would_become_infinite_is_refused_and_nothing_is_loaded() -> None:
    wide, narrow = (torch.zeros(2, dtype=dtype) for dtype in (torch.float64, torch.float32))
    saved = make_outer("nesterov", [wide])
    wide.grad = torch.tensor([1.0, 1e39], dtype=torch.float64)
    saved.step()
    outer = make_outer("nesterov", [narrow])
    with pytest.raises(ConfigError, match=r"'momentum_buffer' with values beyond the largest number .* torch.float32"):
        load_outer(outer, saved.state_dict())
    assert not outer.state
    wide.grad[1] = 0.0
    again = make_outer("nesterov", [wide])
    again.step()
    load_outer(outer, again.state_dict())
    assert outer.state[narrow]["momentum_buffer"].tolist() == [1.0, 0.0]


def test_outer_optimizers_by_name_by_class_and_by_function() -> None:
    anchors = [torch.zeros(3)]
    assert describe_outer(make_outer("nesterov", anchors)) == "SGD(lr=0.7, momentum=0.9, nesterov=True)"
    assert describe_outer(make_outer("sgd", anchors)) == "SGD(lr=1.0)"
    assert "AdamW(" in describe_outer(make_outer(torch.optim.AdamW, anchors))
    assert "lr=0.5" in describe_outer(make_outer(partial(torch.optim.SGD, lr=0.5), anchors))
    for outer, text in ((torch.optim.SGD(anchors), "an optimizer of tensors of its own"), (3, "outer=3 is neither")):
        with pytest.raises(ConfigError, match=text):
            LocalOptions(outer=outer)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="makes a list, not a torch optimizer"):
        make_outer(list, anchors)
    with pytest.raises(ConfigError, match="makes a LBFGS, whose steps evaluate the loss again"):
        make_outer(torch.optim.LBFGS, anchors)
    with pytest.raises(ConfigError, match=r"makes no optimizer of a list of 1 tensor \(TypeError"):
        make_outer(partial(torch.optim.SGD, speed=1), anchors)
    with pytest.raises(ConfigError, match="makes a SGD with lr=nan; give a finite one"):
        make_outer(partial(torch.optim.SGD, lr=float("nan")), anchors)


def test_presets_work_and_are_replaced_by_what_is_given() -> None:
    for name, preset in LOCAL_PRESETS.items():
        options, config = make_local(name, {"every": None}, {})
        assert options.every == preset.options["every"]
        assert config == preset.compression.config
        assert "arXiv" in preset.paper
    options, config = make_local("gqsgd_diloco", {"every": 100, "outer": "sgd"}, {"bits": 2})
    assert (options.every, options.outer, config.bits) == (100, "sgd", 2)
    assert make_local("gqsgd_diloco", {}, {"bits": 32})[1].codec == "float"
    assert make_local("gqsgd_sparseloco", {}, {"density": 0.03})[1].bits == 2
    options, config = make_local("topk_ef", {}, {})
    assert (options.every, config.codec) == (32, "top_k")
