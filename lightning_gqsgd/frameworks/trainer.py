"""The Trainer strategy and its telemetry callback, for both flavours of Lightning.

They are mixins: `trainer_lightning` and `trainer_pytorch_lightning` add them to the classes of their package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, overload

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.ddp.hook import GQSGDState, gqsgd_hook, register_gqsgd
from lightning_gqsgd.errors import ConfigError, check_one_of
from lightning_gqsgd.frameworks.distributed import CHECKPOINT_KEY, StrategyArguments, after_setup, takes
from lightning_gqsgd.frameworks.local import StrategyMixin
from lightning_gqsgd.local_steps.averages import LocalAverages
from lightning_gqsgd.local_steps.merges.averages import MergedAverages
from lightning_gqsgd.presets import PRESETS
from lightning_gqsgd.session.checkpoint import is_of_local_steps
from lightning_gqsgd.wire.telemetry import Meter

if TYPE_CHECKING:
    from typing_extensions import Unpack

_Base: Any = object  # each flavour's Callback


class TrainerMixin(StrategyMixin):
    """DDP with quantised gradients.

    Every field of `GQSGDConfig` is an argument, and overrides the preset's value. None keeps the preset's value; to
    switch a memory off, pass ``memory="none"``.

    Args:
        preset: name of a preset (default ``gqsgd``, and with local steps ``gqsgd_diloco``), or a configuration.
        telemetry: whether to add the callback that logs counters, unless the Trainer already has one.
        local_steps: number of optimizer steps between two averages: each rank trains on its own, without
            DistributedDataParallel, and the changes of the models are averaged (see `LocalSteps`). None: gradients are
            averaged in every step, unless the preset is for local steps, such as ``gqsgd_diloco``. A checkpoint has the
            first rank's parameters, and the state that every rank needs to resume. The last average is made at the end
            of training. With ``elastic``, a time such as ``"20s"`` is also possible.
        outer: with local steps, the outer optimizer. `local_steps.options.LocalOptions` describes this argument, the
            next six, and further fields, which are arguments as well.
        outer_after: with local steps, the number of steps at the start whose averages do not use ``outer``.
        fragments: with local steps, the number of parts that are averaged at different times.
        delay: with local steps, the number of steps after which an average is used.
        mixing: with local steps and a delay, the weight of the rank's own parameters when an average is used.
        inner_state: with local steps, whether to ``"keep"``, ``"reset"`` or ``"average"`` the inner optimizer's state.
        rule: with local steps, the rule by which the changes of all ranks become one mean change.
        elastic: with local steps, whether processes may leave and join. Each process then runs its own Trainer with one
            device, and the processes meet at a lighthouse (docs/elastic.md).
        min_replicas: with ``elastic``, the least number of processes for a merge.
        outlier: if ``local_steps`` is a time, and with ``elastic``: a change whose norm is more than this many times
            the median, as a whole, per step and in relation to the learning rate, is left out.
        validate_at: with local steps, the model that validation during training uses: ``"local"``, the default, is each
            rank's own model; ``"anchor"`` is the anchor, which is the same on all ranks. A checkpoint that is saved
            right after a validation has the weights that were validated.
        **kwargs: arguments of Lightning's DDPStrategy, and of DistributedDataParallel. ``model_averaging_period``
            together with a `PostLocalSGDState` as ``ddp_comm_state`` gives post-local SGD: gradients are first averaged
            in quantised form; later, each rank (or each node) makes its own steps, and all models are averaged every
            ``model_averaging_period`` steps.

    Raises:
        ConfigError: for an unknown argument, a value that cannot work, or a communication hook of the user's.
    """

    _telemetry: Callable[[], Any]  # each flavour's callback
    _settling: Callable[[], Any]  # each flavour's callback
    _ddp_kwargs: dict[str, Any]  # Lightning's: what it gives to DistributedDataParallel
    _pl_static_graph_delay_done: bool  # Lightning's

    @overload
    def __init__(
        self,
        preset: str | GQSGDConfig | None = None,
        *,
        telemetry: bool = True,
        validate_at: str | None = None,
        **kwargs: Unpack[StrategyArguments],
    ) -> None: ...

    @overload
    def __init__(self, preset: str | GQSGDConfig | None = None, **kwargs: Any) -> None: ...

    # Editors read the first overload. The second one has Lightning's arguments.
    @takes(StrategyArguments)
    def __init__(
        self,
        preset: str | GQSGDConfig | None = None,
        *,
        telemetry: bool = True,
        validate_at: str | None = None,
        **kwargs: Any,
    ) -> None:
        rest = self._configure(preset, kwargs)
        self._validates_at_anchor = self._check_validation(validate_at)
        super().__init__(**rest)
        self._adds_telemetry = telemetry
        self._gqsgd_state: GQSGDState | None = None
        self._has_ended = False  # whether the latest fit with local steps has made its last averages
        self._loaded: dict[str, Any] | None = None

    def _check_validation(self, validate_at: str | None) -> bool:
        """Returns whether validation sees the anchor."""
        if validate_at is None:
            return False
        check_one_of("validate_at", validate_at, ("local", "anchor"))
        if self._local is None:
            raise ConfigError(
                f"validate_at={validate_at!r} is for local steps; give local_steps=32 as well, or leave it out"
            )
        return validate_at == "anchor"

    @property
    def gqsgd_state(self) -> GQSGDState | LocalAverages | MergedAverages | None:
        """State of the hook, or the local steps, of the current or latest fit in this process."""
        if self._local is None:
            return self._gqsgd_state
        return self._local.trained[0].averages if self._local.trained else None

    def connect(self, model: Any) -> None:
        """Add the callbacks of this package. Lightning calls this first, while callbacks can still be added to the
        Trainer."""
        super().connect(model)
        callbacks = model.trainer.callbacks
        if self._adds_telemetry and not any(isinstance(callback, TelemetryMixin) for callback in callbacks):
            # In front: checkpoint callbacks have to stay last.
            callbacks.insert(0, self._telemetry())
        is_delayed = self._local is not None and self._local.options.delay > 0  # else no average is ever under way
        if is_delayed and not any(isinstance(callback, SettlingMixin) for callback in callbacks):
            callbacks.insert(0, self._settling())

    def setup_distributed(self) -> None:
        """Set up the process group, then finish as in `distributed.after_setup`."""
        super().setup_distributed()
        after_setup(self.world_size)

    def setup(self, trainer: Any) -> None:
        """Wrap the model, and continue the periodic averaging of a checkpoint."""
        super().setup(trainer)
        if self._local is not None:
            if trainer.state.fn == "fit":
                _refuse_pruning(trainer.callbacks)
                self._local.close()  # those of an earlier fit
                self._has_ended = False
                module = self.lightning_module
                optimizers = self.optimizers
                trained = self._local.begin(module, optimizers, self.gqsgd_config, self._timeout)
                self._rank_zero_info(trained.averages.report())
            return  # what was loaded is for later: the optimizers have not taken their states yet
        self._restore_averager()
        self._loaded = None

    def configure_ddp(self) -> None:
        """Wrap the model and install the hook, on every device: Lightning's own registration skips all but CUDA."""
        if self._local is not None:
            return  # each rank trains the module itself
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        self._pl_static_graph_delay_done = False  # of an earlier fit
        if self._ddp_comm_state is not None:
            self._ddp_comm_state.iter = 0  # of an earlier fit; Lightning makes the averager anew, too
        config = self.gqsgd_config
        state = register_gqsgd(self.model, config, timeout=self._timeout, post_local_sgd=self._ddp_comm_state)
        self._check_installed()
        if self._loaded is not None:
            state.load_state_dict(self._loaded)
        self._gqsgd_state = state
        state.announce(self._rank_zero_info)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Wrap the model again if callbacks or hooks have unfrozen or frozen parameters.

        DDP reduces the parameters that required a gradient when it was built. It would not reduce parameters that were
        unfrozen later, and would wait for the gradients of frozen ones, unless it looks for unused parameters.
        """
        super().on_train_batch_start(batch, batch_idx)
        if self._local is not None:
            return
        assert self._gqsgd_state is not None
        assert isinstance(self.model, DistributedDataParallel)
        unfrozen, frozen = self._gqsgd_state.changes()
        if unfrozen or (frozen and not self.model.find_unused_parameters):
            self._gqsgd_state.rewrap(self._wrap_anew)
            self._check_installed()
            counts = [f"{len(names)} {what}" for names, what in ((unfrozen, "unfrozen"), (frozen, "frozen")) if names]
            noun = "parameter" if len(unfrozen) + len(frozen) == 1 else "parameters"
            self._rank_zero_info(
                f"gqsgd: wrapped the model anew at step {self._gqsgd_state.step}: {', '.join(counts)} {noun}; "
                f"{self._gqsgd_state.report()}"
            )

    def _is_step(self) -> bool:
        """Returns False in the epoch in which StochasticWeightAveraging computes the statistics of BatchNorm: Lightning
        calls the optimizer once then, without a new gradient."""
        return not getattr(self.lightning_module.trainer.fit_loop, "_skip_backward", False)

    def on_validation_start(self) -> None:
        """With local steps and ``validate_at="anchor"``, validate the anchor."""
        super().on_validation_start()
        # Outside of a fit, the weights are those that were asked for.
        if self._local is not None and self._validates_at_anchor and self.lightning_module.trainer.state.fn == "fit":
            self._local.lend_anchors()

    def on_validation_end(self) -> None:
        """Go on with each rank's own parameters."""
        super().on_validation_end()
        if self._local is not None:
            self._local.take_back()

    def settle(self) -> None:
        """With local steps, use the averages under way. Every rank has to call this."""
        if self._local is not None:
            self._local.settle()

    def on_train_end(self) -> None:
        """Report bytes, bits and waiting; with local steps, make the last average."""
        super().on_train_end()
        if self._local is not None:
            self._local.finish()
            self._has_ended = True
        elif self.is_global_zero and self.world_size > 1 and self._gqsgd_state is not None:
            self._rank_zero_info(self._gqsgd_state.summary_line())

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers, and the hook if there already is one; with local steps, the optimizers and the
        parameters of this rank."""
        super().load_optimizer_state_dict(checkpoint)
        if self._loaded is not None and self._local is not None:
            self._local.trained[0].load_state_dict(self._loaded)
            self._has_ended = False  # LearningRateFinder goes back to before its own training
        elif self._loaded is not None and self._gqsgd_state is not None:
            # LearningRateFinder goes back, and what the hook remembers belongs to the weights and to the optimizers.
            self._gqsgd_state.load_state_dict(self._loaded)
            self._restore_averager()
        self._loaded = None

    def _restore_averager(self) -> None:
        """Continue the periodic averaging of a checkpoint."""
        if self._loaded is not None and self._model_averager is not None:
            self._model_averager.step = self._loaded.get("averager_step", self._model_averager.step)

    def _wrap_anew(self, module: Any) -> DistributedDataParallel:
        self.model = module  # ends the old DDP, whose buckets are as large as the gradients
        # Ranks have the same parameters, or their own on purpose: post-local SGD, buffers that are not broadcast.
        arguments = self._ddp_kwargs
        self._ddp_kwargs = {**arguments, "init_sync": False}
        try:
            self.model = self._setup_model(module)
        finally:
            self._ddp_kwargs = arguments
        self._pl_static_graph_delay_done = False
        return self.model

    def _check_installed(self) -> None:
        installed = self.model._get_ddp_logging_data().get("comm_hook")
        assert installed == gqsgd_hook.__qualname__, f"DDP reports the hook {installed!r}"

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Add the hook's state, which is equal on all ranks, to a checkpoint that training can resume from."""
        if self._local is not None and self._local.trained and "optimizer_states" in checkpoint:
            checkpoint[CHECKPOINT_KEY] = self._state_of_local_steps(checkpoint)
        elif self._gqsgd_state is not None and "optimizer_states" in checkpoint:
            checkpoint[CHECKPOINT_KEY] = self._gqsgd_state.state_dict()
            if self._model_averager is not None:
                checkpoint[CHECKPOINT_KEY]["averager_step"] = self._model_averager.step
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _state_of_local_steps(self, checkpoint: dict[str, Any]) -> dict[str, Any] | None:
        assert self._local is not None
        was_lent = self._local.is_lent
        if was_lent:
            # The checkpoint's weights are the parameters themselves, which have the anchor's values only here.
            weights = checkpoint["state_dict"]
            checkpoint["state_dict"] = tree_map_only(Tensor, Tensor.clone, weights)
            self._local.take_back()  # what every rank needs to resume are its own parameters
        state = self._local.trained[0].state_dict()
        if was_lent:
            self._local.lend_anchors()  # another callback may save the weights that were validated, too
        return state

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Keep the hook's state until the hook exists: Lightning loads checkpoints before it wraps the model."""
        checkpoint = super().load_checkpoint(*args, **kwargs)
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == "fit":
            loaded = checkpoint.get(CHECKPOINT_KEY)
            self._loaded = self._usable(loaded, is_local=is_of_local_steps(loaded))
        return checkpoint

    def on_exception(self, exception: BaseException) -> None:
        """Put the names of this strategy into Lightning's hints. After SIGTERM, merge the latest change.

        Lightning has its own handler of SIGTERM, and may end a validation, or an epoch, before the next step would
        leave.
        """
        super().on_exception(exception)
        if self._local is not None and isinstance(exception, SystemExit):
            self._local.take_back()  # a validation may have had the anchor's values
            self._local.leave_if_told()
        exception.args = tuple(self._with_own_names(arg) if isinstance(arg, str) else arg for arg in exception.args)

    def _with_own_names(self, text: str) -> str:
        """Returns a hint of Lightning's, with the preset's name or, for a configuration that has none, with the
        fields."""
        presets = [name for name, preset in PRESETS.items() if preset.config == self.gqsgd_config]
        if presets:
            text = text.replace("'ddp_find_unused", f"'{presets[0]}_find_unused")
        return text.replace("DDPStrategy(", f"{type(self).__name__}(")

    def _skips_end(self) -> bool:
        """Returns whether a fit ends without `on_train_end`, because the checkpoint that it was to resume from is that
        of a training without further steps: each rank then has its own weights still."""
        if self._local is None or not self._local.trained or self._has_ended:
            return False
        state = self.lightning_module.trainer.state
        is_as_planned = state.fn == "fit" and state.status == "running"
        return is_as_planned and self._local.trained[0].averages.step > 0

    def teardown(self) -> None:
        """Stop threads and process groups of the hook; its counters and state stay readable."""
        if self._local is not None:
            self._local.take_back()  # after an error in a validation
            if self._skips_end():
                self._local.finish()
        if self.gqsgd_state is not None:
            self.gqsgd_state.close()
        super().teardown()


def _refuse_pruning(callbacks: Iterable[Any]) -> None:
    """Raise ConfigError if a callback prunes the model between averages."""
    for callback in callbacks:
        # By name, because each flavour of Lightning has its own class.
        if any(ancestor.__name__ == "ModelPruning" for ancestor in type(callback).__mro__):
            raise ConfigError(
                f"local steps do not work with the callback {type(callback).__name__}: each rank would prune other "
                "weights, averages would make fractions of its masks, and the last average would give pruned weights "
                "values other than zero. Prune the model after the fit, or leave local steps out"
            )


class SettlingMixin(_Base):
    """With local steps, uses the averages under way before other callbacks put weights of their own into the model.

    Otherwise, these averages would be mixed with such weights. There are averages under way with ``delay`` only. This
    has to be the first callback.
    """

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Use them before the epoch after the last one, in which StochasticWeightAveraging has put its mean into a
        model with BatchNorm."""
        if any(getattr(callback, "swa_end", None) == trainer.current_epoch - 1 for callback in trainer.callbacks):
            trainer.strategy.settle()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Use them before the end of training, where callbacks put averages of weights into the model."""
        trainer.strategy.settle()


class TelemetryMixin(_Base):
    """Logs the hook's counters under ``gqsgd/`` whenever the Trainer logs (``log_every_n_steps``); see
    `telemetry.Meter`.

    Reading the counters waits for the GPU, so they are read only in batches in which the Trainer logs. Times are means
    since the last reading.
    """

    def __init__(self) -> None:
        self._meter: Meter | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Count from here."""
        state = getattr(trainer.strategy, "gqsgd_state", None)
        self._meter = None if state is None else Meter(state.telemetry)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Log the counters since the last reading, unless no backward pass has reduced gradients since then."""
        if self._meter is None or not trainer._logger_connector.should_update_logs:
            return
        values = self._meter.read()
        state = getattr(trainer.strategy, "gqsgd_state", None)
        if isinstance(state, MergedAverages):
            values |= state.counts()
        if values:
            pl_module.log_dict(values, rank_zero_only=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the hook's summary into that of a W&B run, as ``gqsgd/summary/...``."""
        state = getattr(trainer.strategy, "gqsgd_state", None)
        if not isinstance(state, GQSGDState) or not state.telemetry.steps or not trainer.is_global_zero:
            return
        values = {f"gqsgd/summary/{name}": value for name, value in state.summary().items() if not math.isnan(value)}
        for logger in trainer.loggers:
            # Other loggers have no summary. The class is W&B's of either flavour of Lightning.
            if any(ancestor.__name__ == "WandbLogger" for ancestor in type(logger).__mro__):
                logger.experiment.summary.update(values)
