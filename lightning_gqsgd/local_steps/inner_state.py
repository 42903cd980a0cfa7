"""The state of the inner optimizers: it is reset, averaged, or cleared of values that are not finite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.local_steps.sharding import own_part


def compares_steps(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer compares the gradients and the weights of successive steps.

    L-BFGS takes the difference of two gradients for the curvature along its own step. If an average has moved the
    weights in between, the difference is that of another step.
    """
    return isinstance(optimizer, LBFGS)


class InnerState:
    """The state that inner optimizers keep for parameters, e.g. momenta."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(optimizers)

    def forget_steps(self) -> None:
        """Delete the state of optimizers that compare successive steps, because the weights have moved in between."""
        for optimizer in filter(compares_steps, self._optimizers):
            optimizer.state.clear()

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """Delete the state of some parameters, so that the optimizers create it again."""
        for parameter in parameters:
            for optimizer in self._optimizers:
                optimizer.state.pop(parameter, None)

    def tensors(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Returns the state tensors of some parameters that can be averaged, in the same order on all ranks.

        Step counters, which are single values, are left out, because all ranks make equally many steps.
        """
        return [
            own_part(value)
            for parameter in parameters
            for optimizer in self._optimizers
            for _, value in sorted(optimizer.state.get(parameter, {}).items())
            if isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape
        ]

    def clear_what_is_not_finite(self) -> int:
        """Delete the state of each parameter whose state has a NaN or infinite value. Returns the number of such
        parameters."""
        cleared = 0
        for optimizer in self._optimizers:
            for parameter in list(optimizer.state):
                values = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
                if not all(bool(own_part(value).isfinite().all()) for value in values):
                    del optimizer.state[parameter]
                    cleared += 1
        return cleared


@contextmanager
def all_or_nothing(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Returns a context in which to load states into optimizers. After an error, all optimizers have their previous
    states.

    Raises:
        ConfigError: if a state does not fit. The message includes the error of torch's optimizers.
    """
    before = [optimizer.state_dict() for optimizer in optimizers]
    try:
        yield
    except BaseException as error:
        for optimizer, state in zip(optimizers, before, strict=True):
            optimizer.load_state_dict(state)
        if isinstance(error, (AttributeError, KeyError, TypeError, ValueError)) and not isinstance(error, ConfigError):
            raise ConfigError(
                f"the state is not that of this run's optimizers ({type(error).__name__}: {error}), and nothing of it "
                "was loaded; resume with the optimizers that wrote it"
            ) from error
        raise
