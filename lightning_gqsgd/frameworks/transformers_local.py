"""Local steps in the Trainer of Hugging Face transformers: each process trains the model itself, without DDP."""

from __future__ import annotations

import logging
import math
import secrets
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from accelerate.utils import DistributedType, gather
from transformers import Trainer, TrainerCallback

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import check_has_one_width
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.frameworks.accelerate import (
    WITHOUT_DDP,
    as_on_first_rank,
    ddp_in,
    prepared_to_train,
    read_by_all,
    say_that_there_is_one_process,
    write_whole,
)
from lightning_gqsgd.frameworks.distributed import destroy_at_exit
from lightning_gqsgd.frameworks.local import LocalTraining
from lightning_gqsgd.local_steps.averages import LocalAverages
from lightning_gqsgd.local_steps.merges.averages import MergedAverages
from lightning_gqsgd.wire.telemetry import Meter

logger = logging.getLogger(__name__)

#: Attribute of the models that Accelerate has prepared, and prepares no second time.
_PREPARED = "_is_accelerate_prepared"

#: Where a checkpoint's mark is: in the state's file, and among the states of callbacks in trainer_state.json.
_MARK = "gqsgd_mark"


class MeteredCallback(TrainerCallback):
    """Puts counters (see `telemetry.Meter`) into the logs of a Trainer, and a state into its checkpoints.

    Attributes:
        state_file: name of the state's file in a checkpoint's folder.
        resumes_from: folder of the checkpoint that training resumes from; None: it starts anew.
    """

    state_file: ClassVar[str]

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._meter: Meter | None = None
        self.resumes_from: Path | None = None

    def save(self, folder: Path) -> None:
        """Add the state to a checkpoint. Perhaps a collective."""
        raise NotImplementedError

    def read(self) -> Any:
        """Returns the state in the checkpoint that training resumes from; None: there is none. See `read_by_all`."""
        saved = read_by_all(self.resumes_from and self.resumes_from / self.state_file, self._trainer.accelerator)
        mark = saved.pop(_MARK, None) if isinstance(saved, dict) else None  # earlier versions wrote none
        is_left = mark is not None and self._in_trainer_state().get(_MARK) != _entry_of(mark)
        if not gather(torch.tensor([is_left], device=self._trainer.accelerator.device)).any():
            return saved
        if self._trainer.accelerator.is_main_process:
            logger.warning(
                "gqsgd: %s in %s is not used, because it belongs to an earlier checkpoint, which a Trainer without "
                "gqsgd has written over",
                self.state_file,
                self.resumes_from,
            )
        return None

    def write(self, state: Any, folder: Path) -> None:
        """Write the state in the processes that save. The checkpoint's folder may not exist yet.

        A Trainer without gqsgd that writes over the checkpoint leaves the state's file in it. So the file has a mark
        that is also in the checkpoint's trainer_state.json, which that Trainer writes anew.

        Memories, and the states of local steps, come to rank 0 only. With ``save_on_each_node``, others save as well,
        and this is a collective.
        """
        if self._trainer.args.save_on_each_node:
            state = as_on_first_rank(state)
        if self._trainer.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            mark = secrets.token_hex(8)
            self._in_trainer_state()[_MARK] = _entry_of(mark)
            write_whole({**state, _MARK: mark}, folder / self.state_file)

    def _in_trainer_state(self) -> dict[str, Any]:
        """Returns the states of callbacks that trainer_state.json has, or will have."""
        return cast("dict[str, Any]", self._trainer.state.stateful_callbacks)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Put the counters beside what is logged."""
        values = {} if self._meter is None else self._meter.read()
        values = {name: value for name, value in values.items() if not math.isnan(value)}  # the log is kept as JSON
        for row in (logs, state.log_history[-1]):
            row.update(values)


def _entry_of(mark: str) -> dict[str, Any]:
    """Returns what trainer_state.json has of a mark, as it has the states of callbacks."""
    return {"args": {}, "attributes": {"mark": mark}}


class LocalStepsCallback(MeteredCallback):
    """Counts the Trainer's steps, makes the averages, logs the counters, and keeps the state in checkpoints."""

    state_file = "gqsgd_local.pt"

    def __init__(self, trainer: Trainer, local: LocalTraining, config: GQSGDConfig) -> None:
        super().__init__(trainer)
        self._local = local
        self._config = config

    @property
    def averages(self) -> LocalAverages | MergedAverages | None:
        """Those of the current, or latest, training; None before the first, and in a single process."""
        return self._local.trained[0].averages if self._local.trained else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin, with what the Trainer has loaded, and restore this process's own state.

        Raises:
            ConfigError: a model that cannot work, or that DDP averages in every step, or processes that see different
                checkpoints.
        """
        accelerator = self._trainer.accelerator
        self._local.close()
        if ddp_in(self._trainer.model_wrapped) is not None:
            raise ConfigError(
                "the Trainer has wrapped its model in DistributedDataParallel, which averages gradients in every step, "
                "and local steps do without it. A Trainer does so where its model came wrapped, or where it has made a "
                "new Accelerator since gqsgd was enabled (hyperparameter_search does in every trial); give it the "
                "module itself, and train each trial with a Trainer of its own"
            )
        if accelerator.num_processes == 1 and not self._local.options.elastic:
            return
        destroy_at_exit()
        module = accelerator.unwrap_model(self._trainer.model)
        if getattr(module, _PREPARED, False):
            # With the mark, no other Trainer or Accelerator of this process would wrap the module, which was prepared
            # without DistributedDataParallel, and without a word each rank would train a model of its own.
            delattr(module, _PREPARED)
        inner: Any = getattr(self._trainer.optimizer, "optimizer", self._trainer.optimizer)  # AcceleratedOptimizer's
        trained = self._local.begin(module, [inner], self._config, self._local.given_timeout)
        saved = self.read()
        if self.resumes_from is not None:
            if saved is not None:
                trained.load_state_dict(saved)
            elif accelerator.is_main_process:
                logger.warning(
                    "gqsgd: %s has no %s of its own, because it was saved without local steps or with save_only_model: "
                    "all ranks start from its weights, and the outer optimizer's momentum starts at zero",
                    self.resumes_from,
                    self.state_file,
                )
        self._meter = Meter(trained.averages.telemetry)
        if accelerator.is_main_process:
            print(trained.averages.report(), flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count an optimizer step; use and start the averages that are due."""
        if self.averages is not None:
            self.averages.advance()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the last average, unless the Trainer has put the best checkpoint's weights into the model."""
        if self.averages is not None:
            if not (args.load_best_model_at_end and state.best_model_checkpoint):
                self.averages.finish()
            self.averages.close()

    def save(self, folder: Path) -> None:
        """Add all processes' states to a checkpoint. A collective."""
        if self._local.trained:
            self.write(self._local.trained[0].state_dict(), folder)


def enable_local_steps(trainer: Trainer, local: LocalTraining, config: GQSGDConfig) -> LocalStepsCallback:
    """Prepare a Trainer for local steps; see `enable.enable`. Returns the callback that makes them.

    Raises:
        ConfigError: the Trainer has prepared its model already, or the configuration has several numbers of bits.
    """
    check_has_one_width(config)
    accelerator = trainer.accelerator
    kind = DistributedType(accelerator.distributed_type).value
    if kind in WITHOUT_DDP:
        raise ConfigError(f"this Trainer trains with {kind}, and local steps need whole models; leave {kind} out")
    if prepared_to_train(accelerator, trainer.model):
        raise ConfigError(
            "the Trainer has prepared its model already; enable local steps before `evaluate` and `train`"
        )
    if accelerator.num_processes == 1 and not local.options.elastic:
        say_that_there_is_one_process()
    # The Trainer asks its Accelerator to prepare the model, which would wrap the model in DistributedDataParallel.
    accelerator.prepare_model = partial(accelerator.prepare_model, evaluation_mode=True)
    return LocalStepsCallback(trainer, local, config)
