"""From a node of the configuration to the object that the node describes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_object
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.profilers import Profiler
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_gqsgd.errors import did_you_mean, first_line
from lightning_gqsgd.sparse.options import tables_of
from recipes.data.task_data import TaskData
from recipes.errors import RecipeError, typed
from recipes.measuring import names
from recipes.measuring.metrics import Metric
from recipes.own_folders import make_importable, named_targets
from recipes.strategies.choices import CONF, TARGET, timeout_for
from recipes.tasks.optimizers import OptimizerSettings, OwnOptimizer
from recipes.tasks.task import Task
from recipes.training.checkpoints import CHECKPOINTS
from recipes.training.refusals import refused_values

#: Everything of the repository that a configuration may call. A `_target_` on the command line cannot name another
#: function, not even one that is reachable through these modules; a file in a folder of the user's own can.
ALLOWED_TARGETS = frozenset(
    {
        "lightning_gqsgd.GQSGDStrategy",
        "recipes.data.cifar10.Cifar10Data",
        "recipes.data.clicks.ClickData",
        "recipes.data.digits.DigitsData",
        "recipes.data.image_folder.ImageFolderData",
        "recipes.data.shards.ShardData",
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


#: Modules whose classes any configuration may name: Lightning's callbacks and profilers.
OF_LIGHTNING = {"lightning.pytorch.callbacks": Callback, "lightning.pytorch.profilers": Profiler}


def own_targets() -> frozenset[str]:
    """Every `_target_` in the folders that the user has added to Hydra's search path; none outside of Hydra."""
    if not HydraConfig.initialized():
        return frozenset()
    sources = HydraConfig.get().runtime.config_sources
    folders = [Path(source.path) for source in sources if source.schema == "file" and Path(source.path) != CONF]
    make_importable(folders)
    return named_targets(folders)


def build_network(node: DictConfig, own: frozenset[str] = frozenset()) -> nn.Module:
    """The network of the node `model`."""
    network: nn.Module = build(node, own=own, leave_out=("name",))
    if not isinstance(network, nn.Module) or isinstance(network, LightningModule):
        raise RecipeError(
            f"model._target_={node._target_} makes a {type(network).__name__}, and a model is a torch.nn.Module that "
            "is not a LightningModule; the LightningModule is the task's: a subclass of recipes.tasks.task.Task, named "
            "by task._target_"
        )
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if is_lazy(tensor):
            raise RecipeError(
                f"model._target_={node._target_} has no shape for {name} before its first batch, and optimizer and "
                "strategy need all shapes; give its layers their sizes, e.g. nn.Linear instead of nn.LazyLinear, or "
                "call them on zeros in __init__"
            )
    return network


def build_task(node: DictConfig, own: frozenset[str], **arguments: Any) -> Task:
    """The LightningModule of the node `task`."""
    key = f"task._target_={node._target_}"
    made: Task = _checked(build(node, own=own, leave_out=("metric",), **arguments), Task, key)
    metric = getattr(made, "metric", None)
    if not isinstance(metric, Metric):
        raise RecipeError(
            f"{key} is judged by {metric!r}; give the class a recipes.measuring.metrics.Metric as its attribute "
            'metric, e.g. ACCURACY, or one of your own: Metric("rmse", "RMSE", higher_is_better=False)'
        )
    named = node.get("metric", metric.key)
    if named != metric.key:
        raise RecipeError(
            f"task.metric={typed(named)}, and {key} is judged by {metric.key}; write metric: {metric.key} into the "
            "task's file, or give the class the other metric"
        )
    if not any(parameter.requires_grad for parameter in made.parameters()):
        raise RecipeError(
            f"no parameter of {key} and its model requires a gradient, so there is nothing to train; take another "
            "model, or unfreeze a part of it"
        )
    return made


def build_strategy(node: DictConfig, network: nn.Module) -> Any:
    """The strategy of the node `strategy`.

    The strategy of a preset gathers the touched rows of tables, unless the node says how sparse gradients are sent.
    """
    arguments: dict[str, Any] = {**timeout_for(node)}
    is_open = node._target_ == TARGET and not node.get("local_steps") and node.get("sparse") is None
    if is_open and tables_of(network, frozen=True):
        arguments["sparse"] = "gather"
    return build(node, leave_out=("name",), **arguments)


def build_data(node: DictConfig, own: frozenset[str] = frozenset()) -> TaskData:
    """The data module of the node `data`."""
    return _checked(build(node, own=own), TaskData, f"data._target_={node._target_}")


def build_optimizer(node: Mapping[str, Any], own: frozenset[str] = frozenset()) -> OptimizerSettings | OwnOptimizer:
    """The settings of the node `optimizer`, resolved; or an optimizer of the user's own, if it names one."""
    target = node.get("_target_")
    if target is None:
        return OptimizerSettings(**node)
    settings = OwnOptimizer.of(_found(target, own), node)
    check_call(settings.target, f"optimizer._target_={target}", {"params": (), **settings.arguments})
    return settings


def build_callbacks(nodes: Mapping[str, Any] | None, folder: Path, own: frozenset[str] = frozenset()) -> list[Callback]:
    """The callbacks of the node `callbacks`; an entry that is null is none.

    Args:
        nodes: a node for each callback.
        folder: folder of the run, in which checkpoints are kept that have no `dirpath`.
        own: see `build`.
    """
    callbacks: list[Callback] = []
    for name, node in (nodes or {}).items():
        if node is None:
            continue
        key = f"callbacks.{name}._target_={node._target_}"
        callback: Callback = _checked(build(node, own=own), Callback, key)
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
            callback.dirpath = str(folder / CHECKPOINTS)
        callbacks.append(callback)
    return callbacks


def check_monitors(callbacks: Sequence[Callback], task: Task) -> None:
    """Check that something logs what the callbacks of Lightning watch; they would notice after the first validation.

    Tasks and callbacks of the user's own may log more than recipes do, and nothing is checked beside them.
    """
    kinds = [type(task), *(type(callback) for callback in callbacks)]
    if not all(kind.__module__.startswith(("recipes.", "lightning.")) for kind in kinds):
        return
    after_training = (names.TEST_LOSS, task.metric.test)
    logged = [name for name in (*names.against_time(task.metric), names.TRAIN_TIME) if name not in after_training]
    if hasattr(task, "top5"):
        logged.append(f"val/{names.TOP5}")
    for callback in callbacks:
        watched = getattr(callback, "monitor", None)
        # A ModelCheckpoint may watch the number of the epoch or the step.
        known = [*logged, names.EPOCH, "step"] if isinstance(callback, ModelCheckpoint) else logged
        # Names of rates, which LearningRateMonitor logs, depend on the optimizer, and counters on the strategy.
        if watched is not None and watched not in known and not watched.startswith(("lr-", "gqsgd/")):
            raise RecipeError(
                f"callbacks: {type(callback).__name__} has monitor={watched}, and nothing logs that in training"
                f"{did_you_mean(watched, known)}; take e.g. monitor={names.VAL_LOSS} or monitor={task.metric.val}"
            )


def build_trainer(
    node: Mapping[str, Any], folder: Path, own: frozenset[str] = frozenset(), **arguments: Any
) -> Trainer:
    """The Trainer of the node `trainer`: Lightning's, or a class of the user's that inherits from it.

    Args:
        node: the node, resolved. The entry `profiler` may be a node, too.
        folder: folder of the run, which a profiler without a `dirpath` writes to.
        own: see `build`.
        **arguments: further arguments of the Trainer.
    """
    settings = dict(node)
    target = settings.pop("_target_", None)
    profiler = settings.get("profiler")
    if isinstance(profiler, Mapping):
        place = {} if profiler.get("dirpath") else {"dirpath": str(folder)}
        settings["profiler"] = build(OmegaConf.create(dict(profiler)), own=own, leave_out=tuple(place), **place)
    kind = Trainer if target is None else _found(str(target), own)
    if not (isinstance(kind, type) and issubclass(kind, Trainer)):
        raise RecipeError(f"trainer._target_={target} is not a class that inherits from lightning.pytorch.Trainer")
    if target:
        return _called(kind, str(target), {**settings, **arguments})
    with refused_values("trainer"):
        return kind(**settings, **arguments)


def build(
    node: DictConfig, *, own: frozenset[str] = frozenset(), leave_out: tuple[str, ...] = (), **arguments: Any
) -> Any:
    """Call the `_target_` of a node with the node's other entries.

    Unlike Hydra's `instantiate`, this calls nothing inside the entries.

    Args:
        node: the node, with the entry `_target_`.
        own: further targets that are allowed, see `own_targets`.
        leave_out: names of entries that the target does not take.
        **arguments: further arguments of the target.

    Raises:
        RecipeError: the target is none of `ALLOWED_TARGETS`, of Lightning's callbacks and profilers, and of `own`; or
            a target of `own` cannot be imported, or does not take an entry; or the target does not take the value of
            an entry.
    """
    settings = OmegaConf.to_container(node, resolve=True)
    assert isinstance(settings, dict)
    target = settings.pop("_target_", None)
    kept = {str(name): value for name, value in settings.items() if name not in leave_out}
    return _called(_found(target, own), target, {**kept, **arguments})


def _found(target: Any, own: frozenset[str]) -> Any:
    """What a target names."""
    if target in ALLOWED_TARGETS:
        return get_object(target)
    module, _, name = str(target).rpartition(".")
    if module in OF_LIGHTNING:
        found = getattr(get_object(module), name, None)
        if isinstance(found, type) and issubclass(found, OF_LIGHTNING[module]):
            return found
    if target not in own:
        raise RecipeError(
            f"_target_={target!r} is not one of {', '.join(sorted(ALLOWED_TARGETS))}, nor of Lightning's callbacks and "
            "profilers; name others in a file of your own, e.g. FOLDER/model/NAME.yaml, and add --config-dir FOLDER"
        )
    try:
        return get_object(target)
    except (ImportError, ValueError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error  # Hydra's has several lines
        raise RecipeError(
            f"_target_={target}: {first_line(cause)}; correct the name, start in the folder of the "
            "module, or put that folder on PYTHONPATH"
        ) from error


def check_call(function: Any, name: str, arguments: Mapping[str, Any]) -> None:
    """Check that a function, which a message calls by this name, takes these arguments."""
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise RecipeError(
            f"{name}: {error}; leave the entry out ('~NODE.ENTRY' on the command line), or add what is missing"
        ) from error
    except ValueError:
        pass  # a signature that cannot be read


def _called(function: Any, target: str, arguments: Mapping[str, Any]) -> Any:
    check_call(function, f"_target_={target}", arguments)
    with refused_values(f"_target_={target}"):
        return function(**arguments)


def _checked(made: Any, kind: type, key: str) -> Any:
    if not isinstance(made, kind):
        raise RecipeError(
            f"{key} makes a {type(made).__name__}, and recipes need a {kind.__module__}.{kind.__qualname__}; inherit "
            "from it"
        )
    return made
