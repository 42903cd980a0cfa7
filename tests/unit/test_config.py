import copy
import json
import re
import sys
import warnings
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_gqsgd import _autoload
from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.config.choosing import choose_reducer
from lightning_gqsgd.config.resolving import resolve
from lightning_gqsgd.presets import PRESETS, make_config
from lightning_gqsgd.reducers.base import step_key
from lightning_gqsgd.wire import announcing
from tests.errors import error_text
from tests.processes import ended


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"bits": 9}, ["bits=9", "1 to 8"]),
        ({"bits": 0}, ["bits=0", "1 to 8"]),
        ({"bits": 8.0}, ["bits=8.0", "integer"]),
        ({"bits": True}, ["integer"]),
        ({"bits": 1, "dither": "stochastic"}, ["bits=1", "bits=2"]),
        ({"bits": 1, "reducer": "sum"}, ["bits=1", "two_shot"]),
        ({"bits": 1, "scale": "global"}, ["bits=1", "two_shot"]),
        ({"block_size": 100}, ["block_size=100", "multiple of 8"]),
        ({"block_size": 8}, ["block_size=8", "16 to 65536"]),
        ({"block_size": 0.0}, ["block_size=0.0", "integer"]),
        ({"block_size": False}, ["block_size=False", "integer"]),
        ({"dither": "none"}, ["dither='none'", "subtractive"]),
        ({"reducer": "ring"}, ["reducer='ring'", "two_shot"]),
        ({"reducer": "sum", "scale": "local"}, ["scale='local'", "global", "two_shot"]),
        ({"reducer": "two_shot", "scale": "global"}, ["scale='global'", "local", "sum"]),
        ({"codec": "cubic"}, ["codec='cubic'", "linear"]),
        ({"exclude": "*.bias"}, ["exclude='*.bias'", "sequence"]),
        ({"warmup_steps": -1}, ["warmup_steps=-1"]),
        ({"seed": -1}, ["seed=-1"]),
        ({"codec": "sign", "bits": 8}, ["codec='sign' has bits=1, not bits=8", "leave bits out"]),
        ({"codec": "sign", "bits": 1}, ["is biased", "memory='ef'", "'none'"]),
        (
            {"codec": "sign", "bits": 1, "memory": "ef", "reducer": "two_shot"},
            ["way back", "memory_down='ef'", "gather"],
        ),
        ({"codec": "top_k", "bits": 8}, ["2, 3, 4 or 32, not bits=8"]),
        ({"codec": "top_k", "bits": 32, "memory": "ef", "density": 0}, ["density=0"]),
        ({"codec": "top_k", "bits": 32, "memory": "ef", "density": 1.5}, ["density=1.5", "0 to 1"]),
        ({"codec": "top_k", "bits": 32, "memory": "ef", "rotation": True}, ["rotation=False"]),
        ({"codec": "sign", "bits": 1, "memory": "ef", "reducer": "sum"}, ["two_shot"]),
        ({"codec": "sign", "bits": 1, "memory": "ef", "norm": "l2"}, ["norm='l2'", "sign"]),
        ({"dither": "nearest"}, ["dither='nearest' is biased"]),
        ({"codec": "exponential", "bits": 1}, ["bits=2 to 8, not bits=1"]),
        ({"codec": "exponential", "mantissa": 4}, ["mantissa=4", "0 to 3"]),
        ({"mantissa": 1}, ["codec='exponential'"]),
        ({"codec": "exponential", "dither": "subtractive"}, ["dither='subtractive'", "linear"]),
        ({"codec": "exponential", "reducer": "sum"}, ["tree"]),
        ({"codec": "exponential", "reducer": "tree", "mantissa": 1}, ["mantissa=0"]),
        ({"reducer": "tree"}, ["exponential"]),
        ({"codec": "exponential", "levels": 8, "bits": 4}, ["levels=8", "holds 7", "more bits"]),
        ({"levels": 3}, ["levels=3", "stochastic"]),
        ({"levels": 0, "dither": "stochastic"}, ["levels=0"]),
        ({"block_size": 24, "rotation": True}, ["power of two", "24"]),
        ({"rotation": 1}, ["rotation=1"]),
        ({"clip": -1}, ["clip=-1"]),
        ({"norm": "l1"}, ["norm='l1'", "l2"]),
        ({"coder": "elias"}, ["gather", "leave coder out"]),
        ({"coder": "elias", "reducer": "gather"}, ["dither='stochastic'"]),
        ({"memory": "momentum"}, ["memory='momentum'", "'ecq'"]),
        ({"memory": {"alpha": 2}}, ["alpha=2", "0 to 1"]),
        ({"memory": {"gamma": 1}}, ["gamma"]),
        ({"memory": "ef", "codec": "exponential", "reducer": "tree"}, ["memory", "two_shot"]),
        ({"memory": "ef", "reducer": "native"}, ["memory", "native"]),
        ({"memory_down": "ef", "reducer": "gather"}, ["memory_down", "two_shot"]),
        ({"scale": "global", "reducer": "two_shot"}, ["scale='global'", "gather"]),
    ],
)
def test_bad_values_name_the_limit_and_the_remedy(fields: dict, words: list[str]) -> None:
    text = error_text(ConfigError, GQSGDConfig, **fields)
    assert all(word in text for word in words), text


def test_unknown_names_come_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'block_size'"):
        make_config(blocksize=64)
    with pytest.raises(ConfigError, match="did you mean 'gqsgd_4bit'"):
        make_config("gqsgd-4bit")


def test_presets_are_configurations() -> None:
    assert PRESETS["gqsgd_4bit"].config.bits == 4
    assert make_config("gqsgd_4bit", bits=6).bits == 6
    assert make_config() == GQSGDConfig()


def test_too_many_ranks_for_a_sum() -> None:
    config = GQSGDConfig(reducer="sum", bits=4)
    assert choose_reducer(config, 15) == "sum"
    with pytest.raises(ConfigError, match="at most 15 ranks, not 16; take more bits or reducer='two_shot'"):
        choose_reducer(config, 16)
    with pytest.raises(ConfigError, match="at most 127 ranks, not 128"):
        choose_reducer(GQSGDConfig(reducer="sum", dither="stochastic"), 128)
    with pytest.raises(ConfigError, match="at most 3 ranks"):
        choose_reducer(GQSGDConfig(scale="global", bits=2), 4)


#: The codecs that "auto" stands for, by bits.
AUTOMATIC = {1: "linear", 2: "eden", 3: "companded", 4: "companded", 8: "companded", 16: "float", 32: "float"}


@pytest.mark.parametrize("bits", AUTOMATIC)
def test_a_configuration_whose_bits_are_replaced_has_the_codec_of_one_that_was_made_with_them(bits: int) -> None:
    """Also after other fields were replaced, as they are where ranks are known, and with bits that are chosen."""
    made = GQSGDConfig(bits=bits)
    assert made.codec == AUTOMATIC[bits]
    for before in (1, 2, 4, 8):
        assert GQSGDConfig(bits=before).replaced(bits=bits) == made
        known = resolve(GQSGDConfig(bits=before), 3).replaced(bits=bits)
        assert (known.codec, known.block_size) == (made.codec, made.block_size)
    assert GQSGDConfig(bits={"*": 8, "head": bits}).by_bits()[bits] == made
    if bits != 1:  # no codec has one bit beside the others
        assert GQSGDConfig(auto=True, allow=(8, bits) if bits != 8 else (8, 4)).candidates()[bits] == made


def test_a_codec_that_was_given_stays_whatever_is_replaced() -> None:
    config = GQSGDConfig(codec="companded")
    assert config.replaced(bits=2) == GQSGDConfig(codec="companded", bits=2)
    assert resolve(config, 3).replaced(bits=2).codec == "companded"
    candidates = GQSGDConfig(codec="companded", auto=True, allow=(8, 2)).candidates()
    assert {made.codec for made in candidates.values()} == {"companded"}
    assert GQSGDConfig().replaced(codec="companded").replaced(bits=2).codec == "companded"


@pytest.mark.parametrize(
    "fields",
    [
        {"rotation": True},
        {"block_size": 64},
        {"block_size": 384},
        {"norm": "l2"},
        {"clip": 2.5},
        {"scale_per": "parameter"},
        {"dither": "subtractive"},
        {"sparse": "gather"},
    ],
    ids=str,
)
def test_two_bits_are_companded_where_eden_does_not_go_with_another_field(fields: dict[str, object]) -> None:
    assert GQSGDConfig(bits=2, **fields).codec == "companded"  # type: ignore[arg-type]
    assert GQSGDConfig(bits=2, block_size=512).codec == "eden"


def test_the_plain_values_of_a_configuration_are_plain() -> None:
    assert type(GQSGDConfig(bits=2).to_dict()["codec"]) is str
    again = copy.deepcopy(GQSGDConfig(bits=4))
    assert again == GQSGDConfig(bits=4)
    assert again.replaced(bits=2) == GQSGDConfig(bits=2)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("ranks", [2, 3, 8, 64, 1000])
def test_auto_always_finds_a_reducer(bits: int, ranks: int) -> None:
    assert choose_reducer(GQSGDConfig(bits=bits), ranks) == ("gather" if ranks == 2 else "two_shot")


def test_dither_keys_differ_in_everything_that_enters_them() -> None:
    keys = {step_key(seed, step, stream) for seed in range(3) for step in (0, 1, 2**40) for stream in range(5)}
    assert len(keys) == 45
    assert len({word for key in keys for word in key}) == 90


def test_integers_of_numpy_are_taken_as_pythons() -> None:
    fields = {"block_size": np.int64(64), "min_numel": np.int32(10), "bits": np.uint8(4), "seed": np.int64(3)}
    config = GQSGDConfig(**fields)
    assert config == GQSGDConfig(block_size=64, min_numel=10, bits=4, seed=3)
    json.dumps(config.to_dict())
    assert GQSGDConfig(auto=True, allow=(np.int64(8), 4)) == GQSGDConfig(auto=True, allow=(8, 4))
    by_name = GQSGDConfig(bits={"*": np.int64(4), "head.*": 8})
    assert by_name == GQSGDConfig(bits={"*": 4, "head.*": 8})
    json.dumps(by_name.to_dict())


@pytest.mark.parametrize("bits", [np.float32(4), torch.tensor(4), torch.tensor([4]), np.ones(2), object(), 4.0])
def test_bits_that_are_no_integer_are_told_so(bits: object) -> None:
    with pytest.raises(ConfigError, match=r"bits=.* must be an integer, or 'auto'"):
        GQSGDConfig(bits=bits)  # type: ignore[arg-type]


def test_presets_of_local_steps_are_among_the_nearest_names() -> None:
    with pytest.raises(ConfigError, match="did you mean 'gqsgd_diloco'"):
        make_config("gqsgd_dilcoo")


@pytest.mark.parametrize("error", [OSError, ValueError])
def test_a_closed_stderr_ends_no_training(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(_: str) -> None:
        raise error("closed")

    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=closed, flush=lambda: None))
    announcing.print_to_stderr("a line")
    _fail_to_register(monkeypatch)


def test_nothing_goes_to_stdout_where_stderr_was_closed_before_python_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    announcing.print_to_stderr("a line")
    _fail_to_register(monkeypatch)
    assert capsys.readouterr().out == ""


def _fail_to_register(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `import torch` does beside a Lightning package that has no registry, under ``python -W error``."""
    monkeypatch.setitem(sys.modules, "lightning.pytorch.strategies", ModuleType("strategies"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _autoload.install()


@pytest.mark.slow
def test_numba_that_must_not_compile_is_one_error_that_names_the_variable() -> None:
    code = "import torch; from lightning_gqsgd.kernels import kernels_for; kernels_for(torch.device('cpu'))"
    errors = ended("-c", code, NUMBA_DISABLE_JIT="1").stderr
    assert "ConfigError: the environment variable NUMBA_DISABLE_JIT=1 keeps Numba from compiling" in errors


@pytest.mark.parametrize(
    ("name", "words"),
    [("local_steps", "LocalSteps(model, optimizer, every=32)"), ("op", "multiply it by their number for the sum")],
)
def test_names_that_other_calls_have_are_refused_with_what_to_do_instead(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        GQSGDConfig.check_names([name])
