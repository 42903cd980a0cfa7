"""The types of keyword arguments name all fields that there are."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import get_type_hints

import pytest

from lightning_gqsgd import LocalSteps
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.local_steps.choosing import options_of, pop_options
from lightning_gqsgd.local_steps.options import LocalArguments, LocalOptions
from lightning_gqsgd.spec.fields import FieldArguments


def _keys(arguments: type) -> set[str]:
    return set(arguments.__annotations__)


def test_those_of_a_configuration_are_its_fields() -> None:
    assert _keys(FieldArguments) == set(GQSGDConfig.field_names())


def test_those_of_local_steps_are_the_options_that_it_does_not_name() -> None:
    named = set(inspect.signature(LocalSteps.__init__).parameters)
    assert _keys(LocalArguments) == set(GQSGDConfig.field_names()) | (set(LocalOptions.field_names()) - named)


@pytest.mark.parametrize("options", [GQSGDConfig, LocalOptions])
def test_none_is_a_value_only_where_it_is_the_default(options: type) -> None:
    """An argument of None stands for the preset's value, so it can stand for nothing else."""
    for field in dataclasses.fields(options):
        if type(None) in getattr(get_type_hints(options)[field.name], "__args__", ()):
            assert field.default is None, field.name


@pytest.mark.parametrize("outlier", [3.0, math.inf])
def test_a_limit_of_changes_is_taken_as_it_is_given(outlier: float) -> None:
    given = pop_options({"local_steps": "20s", "outlier": outlier})
    assert options_of(None, given)[0].outlier == outlier


def test_those_of_accelerates_handler_are_its_base_classs_without_hooks() -> None:
    accelerate = pytest.importorskip("accelerate")
    from lightning_gqsgd.frameworks.accelerate import _HOOK_FIELDS, HandlerArguments

    base = {field.name for field in dataclasses.fields(accelerate.DistributedDataParallelKwargs)}
    assert _keys(HandlerArguments) == set(GQSGDConfig.field_names()) | (base - set(_HOOK_FIELDS))


def test_those_of_enable_are_the_handlers_and_those_of_local_steps_and_of_fsdp() -> None:
    pytest.importorskip("accelerate")
    from lightning_gqsgd.frameworks.accelerate import HandlerArguments
    from lightning_gqsgd.frameworks.enable import EnableArguments

    options = set(LocalOptions.field_names()) - {"every", "anchor_device", "anchor_dtype"}
    of_fsdp = {"reduce_scatter", "all_gather_bits"}
    assert _keys(EnableArguments) == _keys(HandlerArguments) | options | of_fsdp | {"local_steps", "timeout"}
