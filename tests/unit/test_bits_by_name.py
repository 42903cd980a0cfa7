"""Bits by patterns of parameter names: which pattern decides, what is refused, and how a tensor is cut."""

import json
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.config.resolving import resolve, resolve_each, setting_of
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.reducers import new_store
from lightning_gqsgd.session.parameters import number_parameters
from lightning_gqsgd.spec.bits_by_name import BitsByName
from lightning_gqsgd.wire.plan import Plan
from tests.errors import error_text

NAMES = {"body.0.weight": nn.Parameter(torch.zeros(64, 64)), "head.weight": nn.Parameter(torch.zeros(64, 64))}


def bits_of(patterns: dict[str, int], **fields: object) -> list[int | None]:
    return [entry.bits for entry in number_parameters(NAMES, GQSGDConfig(bits=patterns, **fields))]


def test_the_last_pattern_that_matches_decides() -> None:
    assert bits_of({"*": 4, "head.*": 8}) == [4, 8]
    assert bits_of({"*.weight": 2, "body.*": 3}) == [3, 2]


@pytest.mark.parametrize(
    ("patterns", "fields", "words"),
    [
        ({"*": 4, "haed.*": 8}, {}, ["'haed.*'", "match no parameter", "head.weight"]),
        ({"*": 4, "*.he": 8}, {}, ["'*.he'", "names look like head.weight"]),
        ({"*": 4, "?": 8}, {}, ["'?'", "names look like body.0.weight, head.weight"]),
        ({"head.*": 8, "*": 4}, {}, ["'head.*'", "decides for no parameter", "general patterns first"]),
        ({"head.*": 8}, {}, ["no pattern matches parameter 'body.0.weight'", """bits={"*": 8, 'head.*': 8}"""]),
        ({"*": 4, "head.*": 9}, {}, ["bits={'head.*': 9}", "1 to 8"]),
        ({"*": 4.5}, {}, ["'*': 4.5", "number of bits"]),
        ({}, {}, ["bits={}", "number of bits"]),
        ([4], {}, ["bits=[4]", "number of bits"]),
        (["head"], {}, ["bits=['head']", "number of bits"]),
        (b"", {}, ["bits=b''", "number of bits"]),
        ({"*": True}, {}, ["bits={'*': True}", "number of bits"]),
        ([["*", 4, 8]], {}, ["bits=[['*', 4, 8]]", "number of bits"]),
        ([["*", 4], ["*", 8]], {}, ["has a pattern twice"]),
        ({"*": 4}, {"auto": True}, ["auto", "leave one out"]),
        ({"*": 4}, {"max_slowdown": 0.1}, ["max_slowdown", "leave one out"]),
        ({"*": 4}, {"memory": "ef"}, ["leave memory and memory_down out"]),
        ({"*": 4}, {"block_size": 100}, ["block_size=100", "multiple of 8"]),
    ],
)
def test_what_cannot_work_names_the_value_and_the_remedy(patterns: Any, fields: dict, words: list[str]) -> None:
    text = error_text(ConfigError, bits_of, patterns, **fields)
    assert all(word in text for word in words), text


def test_a_parameter_that_travels_uncompressed_needs_no_bits() -> None:
    assert bits_of({"head.*": 8}, exclude=["body.*"]) == [None, 8]


def test_a_configuration_survives_plain_values_and_pickling_with_the_order_of_its_patterns() -> None:
    config = GQSGDConfig(bits={"*": 4, "head.*": 8}, exclude=["*.bias"])
    assert GQSGDConfig(**json.loads(json.dumps(config.to_dict()))) == config
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301
    assert config != GQSGDConfig(bits={"head.*": 8, "*": 4}, exclude=["*.bias"])
    assert len({config, GQSGDConfig(bits=BitsByName({"*": 4, "head.*": 8}), exclude=("*.bias",))}) == 1


def test_each_number_of_bits_has_the_configuration_that_it_has_alone() -> None:
    by_bits = resolve_each(GQSGDConfig(bits={"*": 4, "a": 1, "b": 16, "c": 32}, seed=3), 3)
    assert by_bits == {bits: resolve(GQSGDConfig(bits=bits, seed=3), 3) for bits in (4, 1, 16, 32)}


def test_where_parameters_have_no_names_bits_by_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="which have names; here, give bits as a number"):
        resolve(GQSGDConfig(bits={"*": 4}), 2)


@pytest.mark.parametrize(
    ("kinds", "runs"),
    [
        ("a", 1),
        ("aab", 2),
        ("aba", 3),
        ("a-a", 1),  # - travels uncompressed, with the choice of a
        ("b-b", 1),
        ("-b", 1),
        ("-a", 1),
        ("a-b", 2),  # it joins one of two, and the other keeps its own bits
        ("a-bb-a", 3),
        ("--b-ba", 2),
        ("n-a", 2),  # n is not quantised, and so takes the small ones at full precision as they are
        ("n-n", 3),
    ],
)
def test_parameters_that_travel_uncompressed_join_the_pieces_of_their_neighbours(kinds: str, runs: int) -> None:
    configs = [resolve(GQSGDConfig(bits=bits), 3) for bits in (4, 8, 32)]
    segments = [
        Segment(number, 300, kind == "-", "abn".index(kind) if kind in "abn" else 0)
        for number, kind in enumerate(kinds)
    ]
    plan = Plan(segments, *(setting_of(config, 3, torch.float32) for config in configs))
    gradients = [torch.randn(plan.numel) for _ in range(3)]
    mean = torch.stack(gradients).mean(0)
    stores = [new_store(plan.setting, {}, torch.device("cpu")) for _ in range(3)]
    assert len(plan._pieces) == runs
    plan.average(gradients, 0, stores)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients[1:])
    for part, segment in zip(gradients[0].split(300), segments, strict=True):
        exact = mean[segment.parameter * 300 :][:300]
        error = ((part - exact).norm() / exact.norm()).item()
        low, high = {"-": (0, 1e-6), "a": (0.02, 0.3), "b": (1e-4, 0.02), "n": (0, 1e-6)}[kinds[segment.parameter]]
        assert low <= error <= high
