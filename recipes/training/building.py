"""From a node of the configuration to the object that the node describes."""

from __future__ import annotations

from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from torch import nn

from recipes.errors import ModelError, RecipeError

#: Everything that a configuration may call. A `_target_` on the command line, or in a file from elsewhere, cannot name
#: another function, not even one that is reachable through these modules.
ALLOWED_TARGETS = frozenset(
    {
        "lightning_gqsgd.GQSGDStrategy",
        "recipes.data.cifar10.Cifar10Data",
        "recipes.data.clicks.ClickData",
        "recipes.data.digits.DigitsData",
        "recipes.data.image_folder.ImageFolderData",
        "recipes.data.wikitext.WikiTextData",
        "recipes.loggers.tensorboard_events.tensorboard_logger",
        "recipes.loggers.wandb_runs.wandb_logger",
        "recipes.models.deepfwfm.DeepFwFM",
        "recipes.models.gpt2.GPT2",
        "recipes.models.imagenet.torchvision_resnet",
        "recipes.models.transformer.Transformer",
        "recipes.strategies.baselines.BaselineDDPStrategy",
        "recipes.tasks.click_prediction.ClickPredictor",
        "recipes.tasks.image_classification.ImageClassifier",
        "recipes.tasks.language_model.LanguageModel",
        "workloads.convnet.ConvNet",
        "workloads.resnet.ResNet",
    }
)


class TargetError(RecipeError):
    """A configuration that names a `_target_` which recipes do not call."""


def build_network(node: DictConfig) -> nn.Module:
    """The network of the node `model`.

    Raises:
        TargetError: see `build`.
        ModelError: the network refuses a setting.
    """
    try:
        network: nn.Module = build(node, leave_out=("name",))
    except ValueError as error:  # networks outside of recipes know no errors of recipes
        raise ModelError(str(error)) from error
    return network


def build(node: DictConfig, *, leave_out: tuple[str, ...] = (), **arguments: Any) -> Any:
    """Call the `_target_` of a node with the node's other entries.

    Unlike Hydra's `instantiate`, this calls nothing inside the entries, and errors pass through as they are.

    Args:
        node: the node, with the entry `_target_`.
        leave_out: names of entries that the target does not take.
        **arguments: further arguments of the target.

    Raises:
        TargetError: the target is not one of `ALLOWED_TARGETS`.
    """
    settings = OmegaConf.to_container(node, resolve=True)
    assert isinstance(settings, dict)
    target = settings.pop("_target_", None)
    if target not in ALLOWED_TARGETS:
        raise TargetError(f"_target_={target!r} is not one of {', '.join(sorted(ALLOWED_TARGETS))}")
    kept = {str(name): value for name, value in settings.items() if name not in leave_out}
    return get_object(target)(**kept, **arguments)
