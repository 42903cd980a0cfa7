"""Checks that refuse sparse gradients for models and callers that do not support them."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.errors import ConfigError

if TYPE_CHECKING:
    from lightning_gqsgd.config import GQSGDConfig

logger = logging.getLogger(__name__)


def refuse_for(config: GQSGDConfig, what: str) -> None:
    """Raise ConfigError if a configuration asks for sparse gradients and the caller does not support them.

    Args:
        config: the configuration.
        what: the function or framework that is configured, in words.
    """
    if config.sparse != "refuse":
        raise ConfigError(
            f"sparse={config.sparse!r} is for gradients of a DistributedDataParallel model (register_gqsgd, "
            f"GQSGDStrategy, GQSGDKwargs), not for {what}; leave sparse out"
        )


def tables_of(model: nn.Module, *, frozen: bool = False, ignored: Collection[str] = ()) -> dict[str, Tensor]:
    """Returns the parameters of which DDP expects sparse gradients, by name: those of tables with ``sparse=True``.

    Args:
        model: the model that DDP wraps.
        frozen: whether to include parameters that require no gradient now, because they may require one later.
        ignored: names of parameters that DDP was told to ignore.
    """
    tables = {}
    for name, module in model.named_modules():
        is_table = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        if is_table and (frozen or module.weight.requires_grad):
            tables[f"{name}.weight" if name else "weight"] = module.weight
    return {name: table for name, table in tables.items() if name not in ignored}


def check_tables(model: DistributedDataParallel, config: GQSGDConfig, post_local_sgd: PostLocalSGDState | None) -> None:
    """Raise ConfigError if a model gives sparse gradients that the configuration does not support.

    If a table has ``max_norm``, each rank rescales the rows that it looks up. A warning says so.
    """
    tables = tables_of(model.module, ignored=model.parameters_to_ignore)
    if not tables:
        return
    name, table = next(iter(tables.items()))
    module = name.rpartition(".")[0]
    if config.sparse == "refuse":
        raise ConfigError(
            f"module {module!r} gives sparse gradients; compress them with sparse='gather', or build it with "
            "sparse=False"
        )
    if table.device.type != "cpu":
        raise ConfigError(
            f"sparse={config.sparse!r} is for tensors on the CPU, and module {module!r} is on {table.device}: the "
            "lengths of messages follow from the rows, which a GPU would have to wait for; build it with sparse=False"
        )
    if post_local_sgd is not None:
        raise ConfigError(
            f"post-local SGD averages dense gradients, and module {module!r} gives sparse ones; build it with "
            "sparse=False"
        )
    rescaled = [
        name
        for name, child in model.module.named_modules()
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse and child.max_norm is not None
    ]
    if rescaled:
        logger.warning(
            "gqsgd: module %r has max_norm, by which each rank rescales the rows that it looks up itself, so the "
            "tables of ranks differ, as in plain DDP; gradients are equal on all ranks",
            rescaled[0],
        )
