"""What errors and tables say of presets and their fields is what works."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest

from lightning_gqsgd._autoload import _TARGETS, _Names, strategy_names
from lightning_gqsgd.cli.asking import unknown
from lightning_gqsgd.codecs import CODECS
from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.presets import LOCAL_PRESETS, PRESETS, bits_of_name, make_config
from lightning_gqsgd.research.systems import SYSTEMS

#: Another value for each field that a name may stand for; several, so that one differs from any preset's own.
OTHERS: dict[str, tuple[Any, ...]] = {
    "codec": ("companded", "linear", "eden", "trellis"),
    "bits": (3, 4, 8),
    "levels": (2, 3),
    "mantissa": (1, 2),
    "dither": ("stochastic", "subtractive"),
    "reducer": ("two_shot", "gather"),
    "scale_per": ("block",),
}
FIXED_FIELDS = [(name, field) for name, preset in PRESETS.items() for field in preset.fixed]


@pytest.mark.parametrize(("name", "field"), FIXED_FIELDS)
def test_what_a_name_stands_for_cannot_be_replaced(name: str, field: str) -> None:
    own = getattr(PRESETS[name].config, field)
    assert make_config(name, **{field: own}) == PRESETS[name].config
    others = [value for value in OTHERS[field] if value != own]
    assert others
    for value in others:
        for preset in (name, PRESETS[name]):
            with pytest.raises(ConfigError):
                make_config(preset, **{field: value})


def test_terngrad_of_more_levels_is_refused_with_the_fields_that_train_it() -> None:
    with pytest.raises(ConfigError, match="stands for bits=2, not bits=4; leave bits out") as error:
        make_config("terngrad", bits=4)
    pairs = str(error.value).partition("without the preset: ")[2].split(", ")
    fields = {name: ast.literal_eval(value) for name, value in (pair.split("=") for pair in pairs)}
    assert GQSGDConfig(**fields) == PRESETS["terngrad"].config.replaced(bits=4)


def test_a_preset_of_local_steps_is_refused_with_what_takes_it() -> None:
    with pytest.raises(ConfigError, match=r"'gqsgd_diloco' is for local steps.* take LocalSteps\("):
        make_config("gqsgd_diloco")


@pytest.mark.parametrize(
    ("given", "hint"),
    [(3, "bits=3"), (True, "bits=4"), (int, "bits=4"), ({}, "bits=4"), ({"bits": 2, "seed": 1}, "bits=2, seed=1")],
)
def test_what_is_no_preset_is_refused_with_the_fields_that_it_may_mean(given: Any, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf"neither the name of a preset .* e\.g\. {hint}, or a preset"):
        make_config(given)


@pytest.mark.parametrize("fields", [{"auto": True}, {"max_slowdown": 0.1}])
def test_bits_that_are_chosen_replace_those_of_a_preset_of_local_steps(fields: dict[str, Any]) -> None:
    assert make_config(LOCAL_PRESETS["gqsgd_diloco"].compression, **fields).chooses_bits


def _works(**fields: Any) -> bool:
    try:
        GQSGDConfig(**fields)
    except ConfigError:
        return False
    return True


def test_the_error_of_bits_out_of_range_lists_what_works_and_nothing_else() -> None:
    with pytest.raises(ConfigError) as error:
        GQSGDConfig(bits=9)
    listed = re.search(r"out of range: (\d+) to (\d+), (\d+), (\d+), or 'auto'$", str(error.value))
    assert listed is not None
    low, high, *floats = map(int, listed.groups())
    said = {*range(low, high + 1), *floats}
    assert {bits for bits in range(-2, 70) if _works(bits=bits)} == said
    assert _works(bits="auto")


@pytest.mark.parametrize(
    ("codec", "words"),
    [
        ("linear", "1 to 8"),
        ("companded", "2 to 8"),
        ("exponential", "2 to 8"),
        ("eden", "1 to 4"),
        ("trellis", "1 to 4"),
        ("sign", "1"),
        ("top_k", "2, 3, 4 or 32"),
        ("dct_top_k", "32"),
        ("float", "16 or 32"),
    ],
)
def test_each_codec_works_with_its_own_numbers_of_bits_alone(codec: str, words: str) -> None:
    memory = "ef" if codec in ("sign", "top_k", "dct_top_k") else "none"
    for bits in (*range(1, 9), 16, 32):
        if bits in CODECS[codec].widths:
            assert GQSGDConfig(codec=codec, bits=bits, memory=memory).bits == bits
            continue
        with pytest.raises(ConfigError, match=f"codec='{codec}' has bits={words}, not bits={bits}; leave bits out"):
            GQSGDConfig(codec=codec, bits=bits, memory=memory)


def test_bits_by_name_are_numbers_that_the_codec_has() -> None:
    with pytest.raises(ConfigError, match="codec='eden' has bits=1 to 4, not bits=8"):
        GQSGDConfig(codec="eden", bits={"*": 4, "head.*": 8})


def test_every_codec_is_in_the_test_of_its_numbers_of_bits() -> None:
    (mark,) = test_each_codec_works_with_its_own_numbers_of_bits_alone.pytestmark  # type: ignore[attr-defined]
    assert {codec for codec, _ in mark.args[1]} == set(CODECS)


@pytest.mark.parametrize("name", ["gqsgd_8bit", "gqsgd-8bit", "gqsgd8bit", "gqsgd_5bit", "gqsgd_16bit"])
def test_a_name_with_a_number_of_bits_that_is_no_preset_is_led_to_the_one_that_has_it(name: str) -> None:
    bits = bits_of_name(name)
    assert bits is not None
    said = "did you mean 'gqsgd', which has 8 bits?" if bits == 8 else f"did you mean 'gqsgd' with bits={bits}?"
    with pytest.raises(ConfigError, match=re.escape(said)):
        make_config(name)
    assert said in str(unknown(name))
    if name.startswith("gqsgd_"):
        with pytest.raises(ValueError, match=r"did you mean 'gqsgd'\?|GQSGDStrategy\(bits=(5|16)\)"):
            name in _Names(strategy_names(), _TARGETS["lightning.pytorch.strategies"])  # noqa: B015


def test_names_of_presets_ask_for_no_other_bits() -> None:
    assert all(bits_of_name(name) is None for name in (*PRESETS, *LOCAL_PRESETS, *SYSTEMS, "gqsgd4bit", "gqsgd_4bitt"))


def test_no_description_has_an_empty_word() -> None:
    configs = [preset.config for preset in (*PRESETS.values(), *SYSTEMS.values())]
    configs += [preset.compression.config for preset in LOCAL_PRESETS.values()]
    for config in configs:
        text = config.describe()
        assert not re.search(r": [,)]|, ,|\( *[,)]|None", text), text
    assert "memory: rho 1/(2 (1 + ω))" in PRESETS["diana"].config.describe()
    assert "memory: alpha 1/(1 + ω), beta 1" in PRESETS["ecq_sgd"].config.describe()
