"""The network of language modelling, and its metric."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from recipes.errors import RecipeError
from recipes.models.gpt2 import GPT2
from recipes.models.transformer import Transformer
from recipes.tasks.language_model import Perplexity
from recipes.training.building import build, build_network


def _transformer(**settings: Any) -> Transformer:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {
        "vocabulary_size": 50,
        "max_length": 8,
        "layers": 2,
        "width": 16,
        "heads": 4,
        "inner": 32,
    }
    return Transformer(**{**defaults, **settings})


def test_no_output_knows_later_tokens() -> None:
    network = _transformer().eval()
    ids = torch.randint(50, (2, 8))
    before = network(ids)
    assert before.shape == (2, 8, 50)
    for position in range(8):
        changed = ids.clone()
        changed[:, position] = (changed[:, position] + 1) % 50
        after = network(changed)
        assert torch.allclose(after[:, :position], before[:, :position], atol=1e-6)
        # Every later output does, and not only through its own token.
        assert ((after[:, position:] - before[:, position:]).abs().amax(-1) > 1e-6).all()


def test_gpt2_predicts_and_trains_and_refuses_what_it_cannot_build() -> None:
    torch.manual_seed(0)
    network = GPT2(vocabulary_size=50, max_length=8, layers=1, width=16, heads=4, dropout=0.0)
    ids = torch.randint(50, (2, 8))
    before = network(ids)
    assert before.shape == (2, 8, 50)
    changed = ids.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 50
    assert torch.allclose(network(changed)[:, :4], before[:, :4], atol=1e-6)
    before.square().mean().backward()
    assert all(p.grad is not None for p in network.parameters())
    with pytest.raises(RecipeError, match=r"model\.width=16 is not divisible by model\.heads=3"):
        GPT2(vocabulary_size=50, max_length=8, layers=1, width=16, heads=3)
    with pytest.raises(RecipeError, match=r"model\.layers=0, model\.width=16, model\.heads=4: each must be at least 1"):
        GPT2(vocabulary_size=50, max_length=8, layers=0, width=16, heads=4)


def test_tied_weights_are_one_parameter() -> None:
    network = _transformer()
    assert sum(p.shape == (50, 16) for p in network.parameters()) == 1
    block = 4 * 16 * 16 + 4 * 16 + 2 * 16 * 32 + 32 + 16 + 4 * 16
    assert sum(p.numel() for p in network.parameters()) == 50 * 16 + 8 * 16 + 2 * block + 2 * 16


@pytest.mark.parametrize(
    ("model", "vocabulary", "millions"),
    [
        ("transformer_small", 5000, 2.76),
        ("transformer_small", 33278, 8.20),
        ("transformer_xl_base", 267735, 148.2),
        ("gpt2", 33278, 110.7),
    ],
)
def test_models_have_the_size_that_their_files_say(
    composed: Callable[..., DictConfig], model: str, vocabulary: int, millions: float
) -> None:
    cfg = composed("+exp=transformer_wikitext", f"model={model}", f"data.vocabulary_size={vocabulary}")
    with torch.device("meta"):
        network = build(cfg.model, leave_out=("name",))
    assert sum(p.numel() for p in network.parameters()) / 1e6 == pytest.approx(millions, rel=0.005)


TEXT = "+exp=transformer_wikitext"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([TEXT, "model.heads=5"], r"^model\.width=192 is not divisible by model\.heads=5"),
        ([TEXT, "model.dropout=1.5"], r"^model\.dropout=1\.5 is out of range"),
        (
            ["model=convnet", "data=cifar10", "model.widths=[]"],  # of a network that knows no errors of recipes
            r"ConvNet: model\.widths=\[\]: needs at least one group",
        ),
    ],
)
def test_a_refused_setting_is_an_error_of_recipes(
    composed: Callable[..., DictConfig], overrides: list[str], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        build_network(composed(*overrides).model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 3}, r"model\.width=16 is not divisible by model\.heads=3"),
        ({"layers": 0}, "must be at least 1"),
        ({"dropout": 1.0}, r"model\.dropout=1\.0 is out of range"),
    ],
)
def test_impossible_networks_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        _transformer(**settings)


def test_too_long_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match=r"9 tokens is longer than model\.max_length=8"):
        _transformer()(torch.zeros(1, 9, dtype=torch.int64))


def test_perplexity_of_a_uniform_predictor_is_the_vocabularys_size() -> None:
    metric = Perplexity()
    for size in (3, 1):
        metric.update(torch.full((size, 5, 70), 2.5), torch.randint(70, (size, 5)))
    assert float(metric.compute()) == pytest.approx(70, rel=1e-6)


def test_perplexity_weighs_tokens_and_survives_hopeless_logits() -> None:
    metric = Perplexity()
    logits, targets = torch.zeros(2, 1, 2), torch.zeros(2, 1, dtype=torch.int64)
    logits[1, 0, 1] = 200  # the probability of the target is zero in float32
    metric.update(logits, targets)
    assert float(metric.compute()) == pytest.approx(math.exp((math.log(2) + 200) / 2), rel=1e-5)
