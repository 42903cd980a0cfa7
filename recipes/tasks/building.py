"""From a node of the configuration to the object that it describes."""

from __future__ import annotations

from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from recipes.tasks.errors import RecipeError

#: Everything a configuration may call. A `_target_` on the command line or in a file from elsewhere cannot name another
#: function, not even one that is reachable through these modules.
ALLOWED_TARGETS = frozenset(
    {
        "lightning_gqsgd.GQSGDStrategy",
        "recipes.tasks.baselines.BaselineDDPStrategy",
        "recipes.tasks.cifar10.Cifar10Data",
        "recipes.tasks.click_prediction.ClickPredictor",
        "recipes.tasks.clicks.ClickData",
        "recipes.tasks.classifier.ImageClassifier",
        "recipes.tasks.deepfwfm.DeepFwFM",
        "recipes.tasks.digits.DigitsData",
        "recipes.tasks.image_folder.ImageFolderData",
        "recipes.tasks.language_model.LanguageModel",
        "recipes.tasks.loggers.tensorboard_logger",
        "recipes.tasks.loggers.wandb_logger",
        "recipes.tasks.networks.ResNet",
        "recipes.tasks.networks.torchvision_resnet",
        "recipes.tasks.transformer.Transformer",
        "recipes.tasks.wikitext.WikiTextData",
    }
)


class TargetError(RecipeError):
    """A configuration names a `_target_` that recipes do not call."""


def build(node: DictConfig, *, leave_out: tuple[str, ...] = (), **arguments: Any) -> Any:
    """Call the node's `_target_` with its other entries, except those in ``leave_out``, and with ``arguments``.

    Unlike Hydra's `instantiate`, this calls nothing inside the entries and lets errors through as they are.

    Raises:
        TargetError: the node names a target that is not in `ALLOWED_TARGETS`.
    """
    settings = OmegaConf.to_container(node, resolve=True)
    assert isinstance(settings, dict)
    target = settings.pop("_target_", None)
    if target not in ALLOWED_TARGETS:
        raise TargetError(f"_target_={target!r} is not one of {', '.join(sorted(ALLOWED_TARGETS))}")
    kept = {str(name): value for name, value in settings.items() if name not in leave_out}
    return get_object(target)(**kept, **arguments)
