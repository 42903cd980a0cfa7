"""Which parameters of a DDP model are trained: those that required a gradient when DDP was built, and those whose flag
has changed since."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.errors import ConfigError, listed
from lightning_gqsgd.parameters import Parameter


class TrainedParameters:
    """The parameters that a DDP model reduces, and those that it does not reduce.

    Args:
        model: the DDP model.
        entries: number, name and size of each parameter of its module, by the id of the parameter.
    """

    def __init__(self, model: DistributedDataParallel, entries: Mapping[int, Parameter]) -> None:
        ignored = set(model.parameters_to_ignore)
        parameters = {name: p for name, p in model.module.named_parameters() if name not in ignored}
        self._reduced: dict[str, nn.Parameter] = {name: p for name, p in parameters.items() if p.requires_grad}
        self._unreduced: dict[str, nn.Parameter] = {name: p for name, p in parameters.items() if not p.requires_grad}
        self.parameters = [entries[id(p)] for p in self._reduced.values()]

    @property
    def unfrozen(self) -> list[str]:
        """Names of parameters that require a gradient now although DDP does not reduce them."""
        return [name for name, p in self._unreduced.items() if p.requires_grad]

    @property
    def frozen(self) -> list[str]:
        """Names of parameters that require no gradient any more although DDP reduces them."""
        return [name for name, p in self._reduced.items() if not p.requires_grad]

    def check(self) -> None:
        """Raise ConfigError if DDP does not reduce a parameter that requires a gradient."""
        unfrozen = self.unfrozen
        if unfrozen:
            raise ConfigError(
                f"parameter {listed(unfrozen)} requires a gradient, but did not when the model was wrapped in "
                "DistributedDataParallel, which therefore does not reduce it: each rank would train its own. Unfreeze "
                "it before the forward pass and wrap anew: `model = state.rewrap(DistributedDataParallel)`. (The "
                "Lightning strategy does this at the start of a batch, for what was unfrozen by then.)"
            )

    def left_behind(self, reducer: Any) -> dict[str, Tensor]:
        """The gradients of the parameters in `frozen`, by name; of those that have one.

        In the middle of an accumulation they are this rank's own, which DDP would have averaged later.

        Args:
            reducer: DDP's, which is not used any more.

        Raises:
            ConfigError: DDP still waits for gradients of the last backward pass.
        """
        try:
            # The only way to ask, which the next forward pass would go. After the first step it is a collective, which
            # all ranks come to because wrapping anew is one.
            reducer._rebuild_buckets()
        except RuntimeError as error:
            raise ConfigError(
                f"parameter {listed(self.frozen)} was frozen after the forward pass had begun, so that DDP still waits "
                "for its gradient, and no rank got the others' gradients. Freeze it before the forward pass (in "
                "Lightning: in on_train_batch_start, or earlier), or wrap with find_unused_parameters=True"
            ) from error
        gradients = {name: self._reduced[name].grad for name in self.frozen}
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def forget(self) -> None:
        """Let go of the parameters, so that whoever keeps the counters does not keep the model."""
        self._reduced, self._unreduced = {}, {}


def average(gradients: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Replace gradients by their mean over ranks, uncompressed. A collective."""
    for gradient in gradients:
        dist.all_reduce(gradient.div_(group.size()), group=group)
