"""One line that says what is compressed, to how many bits and by which reducer, and what is not, and why."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import counted
from lightning_gqsgd.parameters import Parameter
from lightning_gqsgd.reducers import REDUCERS


def report(
    requested: GQSGDConfig,
    config: GQSGDConfig,
    trained: Sequence[Parameter],
    world_size: int,
    step: int,
    noun: str = "gradient value",
) -> str:
    """The line for a DDP model.

    Args:
        requested: the configuration as the user gave it.
        config: the same with its reducer chosen.
        trained: the parameters whose gradients are reduced.
        world_size: number of ranks.
        step: number of steps so far.
        noun: what a compressed number is called, in the singular.
    """
    if world_size == 1:
        return "gqsgd: one process, nothing to reduce"
    if not REDUCERS[config.reducer].compresses:
        is_one_node = requested.reducer != config.reducer
        cause = f"all {world_size} ranks are on one node" if is_one_node else f"reducer={config.reducer!r}"
        return f"gqsgd: {config.reducer} allreduce over {world_size} ranks, nothing compressed ({cause})"
    rounds_all = config.codec == "float"
    raw = [parameter for parameter in trained if parameter.raw and not rounds_all]
    coded = [parameter for parameter in trained if not parameter.raw or rounds_all]
    if not coded:
        return (
            f"gqsgd: NOTHING IS COMPRESSED over {world_size} ranks: {_raw(raw, config)}. Parameters of at least "
            f"min_numel={config.min_numel} values would be; lower min_numel, or give a larger model"
        )
    text = f"gqsgd: {_values(coded, noun)} at {config.describe()} by {config.reducer} over {world_size} ranks"
    if config.node_size:
        text += f" ({world_size // config.node_size} nodes of {config.node_size})"
    if raw:
        text += f"; uncompressed: {_raw(raw, config)}"
    if config.warmup_steps > step:
        text += f"; uncompressed until step {config.warmup_steps}"
    return text


def _raw(raw: Sequence[Parameter], config: GQSGDConfig) -> str:
    """What travels uncompressed, and why."""
    small = [parameter for parameter in raw if parameter.numel < config.min_numel]
    why = [f"{len(small)} smaller than {config.min_numel}"] if small else []
    why += [f"{len(raw) - len(small)} excluded by name"] if len(raw) > len(small) else []
    return f"{_values(raw, 'value')} ({', '.join(why)})"


def _values(parameters: Sequence[Parameter], noun: str) -> str:
    total = sum(parameter.numel for parameter in parameters)
    return f"{counted(total, noun)} in {counted(len(parameters), 'tensor')}"
