"""The types of keyword arguments name all fields that there are."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from lightning_gqsgd import LocalSteps
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.local_steps.options import LocalArguments, LocalOptions
from lightning_gqsgd.spec.fields import FieldArguments


def _keys(arguments: type) -> set[str]:
    return set(arguments.__annotations__)


def test_those_of_a_configuration_are_its_fields() -> None:
    assert _keys(FieldArguments) == set(GQSGDConfig.field_names())


def test_those_of_local_steps_are_the_options_that_it_does_not_name() -> None:
    named = set(inspect.signature(LocalSteps.__init__).parameters)
    assert _keys(LocalArguments) == set(GQSGDConfig.field_names()) | (set(LocalOptions.field_names()) - named)


def test_those_of_accelerates_handler_are_its_base_classs_without_hooks() -> None:
    accelerate = pytest.importorskip("accelerate")
    from lightning_gqsgd.frameworks.accelerate import _HOOK_FIELDS, HandlerArguments

    base = {field.name for field in dataclasses.fields(accelerate.DistributedDataParallelKwargs)}
    assert _keys(HandlerArguments) == set(GQSGDConfig.field_names()) | (base - set(_HOOK_FIELDS))


def test_those_of_enable_are_the_handlers_and_those_of_local_steps() -> None:
    pytest.importorskip("accelerate")
    from lightning_gqsgd.frameworks.accelerate import HandlerArguments
    from lightning_gqsgd.frameworks.enable import EnableArguments

    options = set(LocalOptions.field_names()) - {"every", "anchor_device", "anchor_dtype", "outlier"}
    assert _keys(EnableArguments) == _keys(HandlerArguments) | options | {"local_steps"}
