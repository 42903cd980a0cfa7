"""The fields of a configuration that concern sparse gradients, and the models and callers that cannot have them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.errors import ConfigError, check_one_of, check_real

if TYPE_CHECKING:
    from lightning_gqsgd.config import GQSGDConfig

logger = logging.getLogger(__name__)

#: What can be done with sparse gradients.
METHODS = ("refuse", "gather", "logarithmic", "sketch")
#: The default of the field ``sparse_limit``. A gather sends each rank's touched rows to all ranks, and a dense
#: reduction sends each coordinate about twice. A row of few coordinates has a scale of its own and a row number, which
#: take about as much again.
LIMIT = 1.0
_MOST = 2**20


def check(config: GQSGDConfig) -> None:
    """Check the fields about sparse gradients.

    Raises:
        ConfigError: a value out of its range, or a combination with fields that sparse gradients cannot have.
    """
    check_one_of("sparse", config.sparse, METHODS)
    check_real("sparse_limit", config.sparse_limit, 0, _MOST)
    if config.sparse == "refuse":
        if config.sparse_limit != LIMIT:
            raise ConfigError(
                f"sparse_limit={config.sparse_limit} is for sparse='gather', not sparse='refuse'; leave it out"
            )
        return
    named = f"sparse={config.sparse!r}"
    if config.remembers:
        raise ConfigError(
            f"{named} goes with codecs that remember nothing, because a memory has a number for every row of a table; "
            "leave memory and memory_down out"
        )
    if config.scale == "global":
        raise ConfigError(f"{named} has a scale of each touched row and rank, not scale='global'; leave scale out")
    if config.scale_per == "parameter":
        raise ConfigError(f"{named} has a scale of each touched row, not scale_per='parameter'; leave scale_per out")
    if config.coder == "elias":
        raise ConfigError(f"{named} writes the codes of rows with a fixed width, not coder='elias'; leave coder out")
    if config.sparse == "logarithmic" and (config.codec == "float" or config.num_bits < 2):
        raise ConfigError(f"{named} needs a sign and an exponent, so 2 to 8 bits, not bits={config.bits}")


def refuse_for(config: GQSGDConfig, what: str) -> None:
    """Raise ConfigError if a configuration asks for sparse gradients where they do not exist.

    Args:
        config: the configuration.
        what: what is configured, for the message.
    """
    if config.sparse != "refuse":
        raise ConfigError(
            f"sparse={config.sparse!r} is for gradients of a DistributedDataParallel model (register_gqsgd, "
            f"GQSGDStrategy, GQSGDKwargs), not for {what}; leave sparse out"
        )


def tables_of(model: DistributedDataParallel, *, frozen: bool = False) -> dict[str, Tensor]:
    """The parameters of a model that DDP expects sparse gradients of, by name.

    Args:
        model: the DDP model.
        frozen: whether those that require no gradient are among them, which may require one later.
    """
    tables = {}
    for name, module in model.module.named_modules():
        is_table = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        if is_table and (frozen or module.weight.requires_grad):
            tables[f"{name}.weight" if name else "weight"] = module.weight
    return tables


def check_tables(
    model: DistributedDataParallel, config: GQSGDConfig, post_local_sgd: PostLocalSGDState | None = None
) -> None:
    """Raise ConfigError if a model gives sparse gradients that the configuration cannot have.

    Rows of a table with ``max_norm`` are rescaled by each rank that looks them up. A warning says so.
    """
    tables = tables_of(model)
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
    if model.static_graph:
        # DDP then calls all buckets of the first step the first one, and none the last one, so steps are miscounted.
        raise ConfigError(
            f"static_graph=True does not tell hooks where its first step ends if gradients are sparse, as those of "
            f"module {module!r} are; leave static_graph out"
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
