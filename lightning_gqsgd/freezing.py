"""Which parameters of a DDP model are trained: those that required a gradient when DDP was built, and those whose flag
has changed since."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
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

    def forget(self) -> None:
        """Let go of the parameters, so that whoever keeps the counters does not keep the model."""
        self._reduced, self._unreduced = {}, {}
