"""Local steps under a strategy of Lightning's Trainer or Fabric."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import check_has_one_width
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.frameworks.distributed import as_timeout, parameter_names, split_arguments
from lightning_gqsgd.local_steps.averages import LocalAverages
from lightning_gqsgd.local_steps.checkpoint import gathered_state, load_gathered
from lightning_gqsgd.local_steps.choosing import asks_for_local_steps, options_of, pop_options
from lightning_gqsgd.local_steps.merges.averages import MergedAverages
from lightning_gqsgd.local_steps.options import MOST_STEPS, LocalOptions
from lightning_gqsgd.presets import Preset

#: Steps of each other optimizer without one of the first optimizer, of whose steps a round consists, after which the
#: first one seems never to make a step. The code of WGAN (arXiv 1701.07875) makes 100 steps of the critic before the
#: first step of the generator.
_STEPS_WITHOUT_FIRST = 1000

_Base: Any = object  # each flavour's DDPStrategy
_Loaded = TypeVar("_Loaded")


@dataclass(eq=False)
class TrainedModule:
    """A module that is trained by local steps, with the optimizers whose steps are counted together.

    Attributes:
        averages: of the module.
        module: the module that is trained.
        optimizers: those of the module, of which the first one's steps count.
        others: number of steps that the other optimizers have made.
    """

    averages: LocalAverages | MergedAverages
    module: nn.Module
    optimizers: list[Optimizer]
    others: int = 0

    def count(self, optimizer: Optimizer) -> None:
        """Count a step of one of the optimizers.

        Raises:
            ConfigError: if the first one has made no step, and the others have made so many that it seems never to make
                one.
        """
        if optimizer is self.optimizers[0]:
            self.averages.advance()
            return
        self.others += 1
        options = self.averages.options
        limit = MOST_STEPS if options.every_s is not None else max(_STEPS_WITHOUT_FIRST, options.steps_of_round(0))
        if not self.averages.step and self.others > limit * (len(self.optimizers) - 1):
            raise ConfigError(
                f"the first of {len(self.optimizers)} optimizers has made no step, and the others {self.others}, more "
                f"than {limit} each: models are averaged every {options.every_in_words()} of the first one, so none of "
                "these steps was averaged; let configure_optimizers return an optimizer that steps in every batch first"
            )

    def state_dict(self) -> dict[str, Any] | None:
        """Returns the state that all ranks need to resume, on rank 0; None on the others. A collective.

        Members that come and go save what they have in common, each by itself.
        """
        if isinstance(self.averages, MergedAverages):
            own = {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}
            return {**self.averages.state_dict(), "ranks": [own]}
        return gathered_state(self.averages, self.optimizers)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict`."""
        if isinstance(self.averages, MergedAverages):
            self.averages.load_state_dict(state, lambda: self._load_optimizers(state))
            return
        load_gathered(self.averages, state, self.optimizers)

    def _load_optimizers(self, state: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, state["ranks"][0]["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


class LocalTraining:
    """The local steps of a strategy.

    Attributes:
        options: when and how to average.
        given_timeout: the timeout that the user has given; None: none. Members that come and go wait for this long for
            one that has died, and not for Lightning's half an hour.
        trained: the modules that are trained, in the order in which they were set up.
        is_lent: whether the modules have the anchors' values, see `lend_anchors`.
    """

    def __init__(self, options: LocalOptions, given_timeout: timedelta | None = None) -> None:
        self.options = options
        self.given_timeout = given_timeout
        self.trained: list[TrainedModule] = []
        self._at_anchor = ExitStack()
        self.is_lent = False

    @classmethod
    def asked_for(
        cls, preset: str | GQSGDConfig | None, arguments: dict[str, Any]
    ) -> tuple[LocalTraining | None, str | GQSGDConfig | Preset | None]:
        """Returns the local steps that a strategy's arguments ask for, if any, and the compression.

        Args:
            preset: the strategy's argument.
            arguments: all others. Those of local steps are removed.

        Raises:
            ConfigError: a value that cannot work, or arguments of which one does nothing beside the others.
        """
        given = pop_options(arguments)
        if not asks_for_local_steps(preset, given):
            return None, preset
        of_ddp = [name for name in arguments if name in (*parameter_names(DistributedDataParallel), *_OF_DDP_STRATEGY)]
        if of_ddp:
            raise ConfigError(
                f"local steps train the module itself, without DistributedDataParallel, for which {', '.join(of_ddp)} "
                "is; leave it out"
            )
        options, compression = options_of(preset, given)
        if options.every_s is not None and not options.elastic:
            raise ConfigError(
                f"local_steps={options.every_in_words()}: ranks make different numbers of steps, and Lightning's own "
                "collectives, at the end of an epoch, count on equal ones; give elastic=True, with which each process "
                "trains by itself (docs/elastic.md), or use LocalSteps in a loop of your own"
            )
        return cls(options, as_timeout(arguments.get("timeout"))), compression

    def begin(
        self, module: nn.Module, optimizers: Sequence[Optimizer], config: GQSGDConfig, timeout: timedelta | None
    ) -> TrainedModule:
        """Begin with a module and its optimizers; ``timeout`` is that of the strategy's collectives. A collective."""
        kind = MergedAverages if self.options.is_merged else LocalAverages
        timeout = self.given_timeout if self.options.elastic else timeout
        averages = kind(module, optimizers, self.options, config, timeout=timeout)
        self.trained.append(TrainedModule(averages, module, list(optimizers)))
        return self.trained[-1]

    def forget_closed(self) -> list[nn.Module]:
        """Forget the modules whose averages were closed, and return them."""
        closed = [trained for trained in self.trained if trained.averages.is_closed]
        self.trained = [trained for trained in self.trained if trained not in closed]
        return [trained.module for trained in closed]

    def count(self, optimizer: Optimizer) -> None:
        """Count a step. Where several optimizers are counted together, the steps of the first one count.

        Raises:
            ConfigError: local steps did not begin with this optimizer; or see `TrainedModule.count`.
        """
        owners = self._owners(optimizer)
        if not owners:
            raise ConfigError(
                f"this {type(optimizer).__name__} was made after local steps began, which would not count its steps, "
                "or its averages were closed; keep the optimizers of configure_optimizers, and change their "
                "param_groups, or begin another fit"
            )
        for trained in owners:
            trained.count(optimizer)

    def check_start(self, optimizer: Optimizer) -> None:
        """Before the very first step of any optimizer of a module, check what the module starts from; see
        `LocalAverages.check_start`."""
        for trained in self._owners(optimizer):
            trained.averages.check_start()

    def _owners(self, optimizer: Optimizer) -> list[TrainedModule]:
        """Returns the modules that an optimizer trains."""
        return [trained for trained in self.trained if any(optimizer is own for own in trained.optimizers)]

    def start_anew(self, loaded: Iterable[nn.Module]) -> None:
        """Begin again with the weights that modules have loaded, where those are trained. A collective."""
        own = {id(parameter) for module in loaded for parameter in module.parameters()}
        for trained in self.trained:
            if any(id(parameter) in own for parameter in trained.module.parameters()):
                trained.averages.start_anew()

    def lend_anchors(self) -> None:
        """Give the modules the anchors' values until `take_back`, or those of the preserved model where there is one. A
        collective."""
        self.is_lent = True
        for trained in self.trained:
            averages = trained.averages
            lent = averages.at_preserved() if isinstance(averages, LocalAverages) else averages.at_anchor()
            self._at_anchor.enter_context(lent)

    def take_back(self) -> None:
        """Give the modules this rank's own values again."""
        self._at_anchor.close()
        self.is_lent = False

    def settle(self) -> None:
        """Use the averages under way now. A collective; among members that come and go, it waits for their merge."""
        for trained in self.trained:
            trained.averages.settle()

    def finish(self) -> None:
        """Make the last averages."""
        for trained in self.trained:
            trained.averages.finish()

    def leave_if_told(self) -> None:
        """After SIGTERM, let members that come and go merge their latest changes, and leave."""
        for trained in self.trained:
            if isinstance(trained.averages, MergedAverages):
                trained.averages.leave_if_told()

    def close(self) -> None:
        """Stop threads and process groups, and forget the modules."""
        for trained in self.trained:
            trained.averages.close()
        self.trained.clear()


#: Arguments of Lightning's DDPStrategy that are about DistributedDataParallel.
_OF_DDP_STRATEGY = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")


class StrategyMixin(_Base):
    """The methods that are the same for the Trainer's strategy and for Fabric's."""

    gqsgd_config: GQSGDConfig
    _local: LocalTraining | None  # None: gradients are averaged
    _rank_zero_info: Callable[[str], None]  # each flavour's log of the first process

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Do nothing: `_autoload` registers the names when the package is imported."""

    def _configure(self, preset: str | GQSGDConfig | None, arguments: dict[str, Any]) -> dict[str, Any]:
        """Set the local steps and the compression that a strategy's arguments ask for. Returns the other arguments."""
        self._local, compression = LocalTraining.asked_for(preset, arguments)
        self.gqsgd_config, rest = split_arguments(type(self), compression, arguments)
        if self._local is not None:
            check_has_one_width(self.gqsgd_config)
        return rest

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Make an optimizer's step; with local steps, use and start the averages that are due."""
        if self._local is not None:
            self._local.check_start(optimizer)
        output = super().optimizer_step(optimizer, *args, **kwargs)
        if self._local is not None and self._is_step():
            self._local.count(optimizer)
        return output

    def _is_step(self) -> bool:
        """Returns whether the optimizer is called to change weights."""
        return True

    def _usable(self, loaded: _Loaded | None, *, is_local: bool) -> _Loaded | None:
        """Returns what a checkpoint has of this strategy, or None if that is not for the way in which this run
        averages.

        Users change between the two ways. The weights go on then, and a line says what starts anew.

        Args:
            loaded: the state or the states in the checkpoint; None: there are none.
            is_local: whether local steps have written them.
        """
        if loaded is not None and is_local == (self._local is not None):
            return loaded
        if self._local is not None:
            text = "written without local steps; its weights are the anchor"
        elif is_local:
            text = (
                "written with local steps; from its weights on, gradients are averaged in every step, and the count of "
                "steps and the dither start anew"
            )
        else:
            text = "written without gqsgd; its dither starts anew"
        self._rank_zero_info(f"gqsgd: the checkpoint was {text}")
        return None
