"""The Trainer of Hugging Face transformers: counters in its logs, and the hook's state in its checkpoints."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.frameworks.accelerate import GQSGDKwargs, enable_accelerator, is_seen
from lightning_gqsgd.frameworks.local import LocalTraining
from lightning_gqsgd.frameworks.transformers_local import LocalStepsCallback, MeteredCallback, enable_local_steps
from lightning_gqsgd.local_steps.choosing import pop_options
from lightning_gqsgd.presets import make_config
from lightning_gqsgd.wire.announcing import print_to_stderr
from lightning_gqsgd.wire.telemetry import Meter

#: File of the hook's state in a checkpoint's folder.
STATE_FILE = "gqsgd.pt"


class GQSGDCallback(MeteredCallback):
    """Logs the hook's counters, and saves and restores its state."""

    def __init__(self, trainer: Trainer, handler: GQSGDKwargs) -> None:
        super().__init__(trainer)
        self._handler = handler

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore, and count from here: the model has just been wrapped.

        Raises:
            ConfigError: the Trainer does not use the hook, or ranks see different checkpoints.
        """
        self._check_that_the_hook_is_used()
        if self.resumes_from is not None:
            self._restore(self.resumes_from / STATE_FILE)
        states = self._handler.states
        self._meter = Meter(states[-1].telemetry) if states else None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report bytes, bits and waiting on rank 0."""
        for hook in self._handler.states[-1:]:
            if state.is_world_process_zero and hook.telemetry.steps:
                print_to_stderr(hook.summary_line())

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the hook's state to a checkpoint that training can resume from."""
        if args.save_only_model:
            return
        saved = self._handler.state_dict()  # perhaps a collective
        if args.should_save:
            torch.save(saved, Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / STATE_FILE)

    def _check_that_the_hook_is_used(self) -> None:
        accelerator = self._trainer.accelerator
        if accelerator.ddp_handler is not self._handler:
            raise ConfigError(
                "the Trainer has made a new Accelerator since gqsgd was enabled (hyperparameter_search does in every "
                "trial), so gradients are not compressed; train each trial with a Trainer of its own"
            )
        if accelerator.num_processes > 1 and not self._handler.states:
            raise ConfigError(
                "the Trainer has not wrapped its model in DistributedDataParallel, so each process would train on its "
                "own; it leaves that out after `evaluate` or `predict`: call them after `train`, or set "
                "TrainingArguments(eval_on_start=True)"
            )

    def _restore(self, file: Path) -> None:
        if is_seen(file, self._trainer.accelerator):
            self._handler.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        else:
            self._handler.load_state_dict({"states": []})


def enable_trainer(
    trainer: Trainer, preset: str | GQSGDConfig | None = None, **fields: Any
) -> GQSGDKwargs | LocalStepsCallback:
    """Enable compression on a ``transformers.Trainer``; see `enable.enable`."""
    local, compression = LocalTraining.asked_for(preset, pop_options(fields), fields)
    if local is not None:
        callback = enable_local_steps(trainer, local, make_config(compression, **fields))
        _tell_what_is_resumed(trainer, callback)
        return callback
    handler = enable_accelerator(trainer.accelerator, preset, **fields)
    hooked = GQSGDCallback(trainer, handler)
    # In front of those that print and upload logs.
    trainer.callback_handler.callbacks.insert(0, hooked)
    _tell_what_is_resumed(trainer, hooked)
    return handler


def _tell_what_is_resumed(trainer: Trainer, callback: MeteredCallback) -> None:
    """Tell a callback, when training begins, from which folder the Trainer resumes."""
    train = trainer.train

    # No event tells callbacks which checkpoint is resumed from.
    @functools.wraps(train)
    def train_and_restore(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        last = resume_from_checkpoint is True
        folder = get_last_checkpoint(trainer.args.output_dir) if last else resume_from_checkpoint
        callback.resumes_from = Path(folder) if folder else None
        return train(resume_from_checkpoint, *args, **kwargs)

    trainer.train = train_and_restore  # type: ignore[method-assign]
