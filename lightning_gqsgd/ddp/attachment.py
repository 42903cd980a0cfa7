"""The hook on one DDP model, and what ends with that model: another one may be wrapped around the same module."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.adaptive.plain import PlainPath
from lightning_gqsgd.ddp.parameters import NumberedParameters, UnusedParameters
from lightning_gqsgd.ddp.unaveraged import BackwardWatch, TrainedParameters
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.layout import Segment


class Attachment:
    """What belongs to one DDP model and to the hook on it.

    Args:
        model: the DDP model.
        parameters: the parameters of its module.
        ranks: number of ranks.
        remembers: whether anything is remembered of gradients.
        plain: lets plain DDP take the hook's place; None: the hook stays.

    Attributes:
        trained: which parameters DDP reduces.
        plain: see above.
        skips_buckets: whether DDP hands over no bucket without used parameters, the last one included.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        parameters: NumberedParameters,
        *,
        ranks: int,
        remembers: bool,
        plain: PlainPath | None,
    ) -> None:
        self._model = weakref.ref(model)
        self.trained = TrainedParameters(model, parameters.entries)
        self.plain = plain
        self.skips_buckets = getattr(model, "skip_all_reduce_unused_params", False)
        self._unused: UnusedParameters | None = None
        # DDP drops the results of unused parameters, except where it has learnt once which ones are used.
        if remembers and model.find_unused_parameters and not model.static_graph:
            numbers = [entry.number for entry in self.trained.parameters]
            self._unused = UnusedParameters(model, parameters.store, numbers)
        self._watch = BackwardWatch(model, list(self.trained.reduced.values())) if ranks > 1 else None

    @property
    def model(self) -> DistributedDataParallel | None:
        """The DDP model; None once it is gone."""
        return self._model()

    def check_divisor(self) -> None:
        """Raise ConfigError for a step inside of torch's `Join` that asks for another divisor than the number of
        ranks."""
        if getattr(self._model(), "_divide_by_initial_world_size", True) is False:
            raise ConfigError(
                "Join with divide_by_initial_world_size=False divides by the number of ranks that still have inputs, "
                "which a communication hook is not told; gqsgd divides by the number of all ranks: leave it at True"
            )

    def before_forward(self, model: DistributedDataParallel) -> None:
        """Note a forward pass; raises ConfigError if the backward pass before has not reached DDP."""
        if self._watch is not None:
            self._watch.before_forward(model, has_hook=self.plain is None or not self.plain.is_on)

    def before_bucket(self, x: Tensor, segments: Sequence[Segment]) -> None:
        """Keep what is remembered of parameters in a bucket that perhaps no rank has used."""
        if self._unused is not None:
            self._unused.watch(x, segments)

    def end_hook_step(self) -> None:
        """Note that the hook has got the last bucket of a step."""
        if self._unused is not None:
            self._unused.settle_after_backward()
        if self.plain is not None:
            self.plain.end_hook_step()

    def end_backward(self) -> None:
        """Note that all gradients of a backward pass have been handed over, to this hook or one of torch's."""
        if self._watch is not None:
            self._watch.end_reduction()

    def detach(self) -> None:
        """Leave the model: another one is wrapped around its module."""
        if self._watch is not None:
            self._watch.remove()
        if self.plain is not None:
            self.plain.remove()

    def close(self) -> None:
        """Let go of the model: the hook was closed. A forward pass raises that, also while plain DDP has its place."""
        if self.plain is not None:
            self.plain.forget()
        if self._watch is not None:
            self._watch.remove()
        self.trained.forget()

    def is_on(self, model: nn.Module) -> bool:
        """Returns True for this model, and False for copies of it."""
        return self._model() is model
