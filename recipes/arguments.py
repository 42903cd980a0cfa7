"""Entries of a configuration that nothing takes, found before the class that would refuse them is imported."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipes.errors import RecipeError
from recipes.loggers.chosen import chosen_loggers
from recipes.signatures import argument_names

#: Most names that a message lists.
MOST_NAMED = 8
#: Packages whose classes a configuration may name.
PACKAGES = ("lightning_gqsgd", "recipes", "workloads")


@dataclass(frozen=True)
class Node:
    """A node whose entries are the arguments of a call.

    Attributes:
        target: what is called; None: what the entry ``_target_`` names.
        left_out: entries that are no arguments.
        given: arguments that the recipe gives itself.
    """

    target: str | None = None
    left_out: tuple[str, ...] = ()
    given: tuple[str, ...] = ()


NODES = {
    "data": Node(),
    "model": Node(left_out=("name",)),
    "task": Node(left_out=("metric",), given=("network", "settings")),
    "strategy": Node(left_out=("name",)),
    "optimizer": Node("recipes.tasks.optimizers.OptimizerSettings"),
    "trainer": Node(
        "lightning.pytorch.Trainer",
        given=(
            *("strategy", "plugins", "logger", "callbacks", "default_root_dir", "num_sanity_val_steps"),
            *("enable_model_summary", "enable_progress_bar", "enable_checkpointing"),
        ),
    ),
}

_LOGGER = Node(left_out=("name", "group"), given=("folder", "labels", "metric"))


def check_arguments(config: Mapping[str, Any]) -> None:
    """Check that every entry of a node is an argument of what the node calls.

    Nodes whose arguments cannot be read from the source are not checked: the call itself refuses what it does not take.

    Raises:
        RecipeError: an entry is no argument, or is one that the recipe gives itself.
    """
    loggers = {key: (_LOGGER, entries) for key, entries in chosen_loggers(config).items()}
    for name, (node, entries) in {**{key: (node, config[key]) for key, node in NODES.items()}, **loggers}.items():
        target = str(entries.get("_target_") or node.target)
        if (node.target is None or "_target_" in entries) and target.partition(".")[0] not in PACKAGES:
            continue
        names = argument_names(target)
        if names is None:
            continue
        for key, value in entries.items():
            if key == "_target_" or key in node.left_out:
                continue
            if key in node.given:
                raise RecipeError(f"{name}.{key}={value}: recipes give {target} its {key} themselves; leave it out")
            if key not in names:
                remedy = _remedy(name, str(key), names.difference(node.given), target)
                raise RecipeError(f"{name}.{key}={value}: {target} has no argument {key}; {remedy}")


def _remedy(node: str, key: str, names: frozenset[str], target: str) -> str:
    near = difflib.get_close_matches(key, sorted(names), n=1, cutoff=0.7)
    if near:
        return f"did you mean {node}.{near[0]}?"
    if len(names) <= MOST_NAMED:
        return f"it has {', '.join(sorted(names))}"
    return f"leave it out, or name an argument that {target} has"
