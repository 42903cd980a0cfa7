"""The Trainer of Hugging Face transformers: counters in its logs, and the hook's state in its checkpoints."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.ddp.hook import GQSGDState
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.frameworks.accelerate import GQSGDKwargs, ddp_in, enable_accelerator
from lightning_gqsgd.frameworks.local import LocalTraining
from lightning_gqsgd.frameworks.transformers_fsdp import FSDPCallback, enable_fsdp
from lightning_gqsgd.frameworks.transformers_local import LocalStepsCallback, MeteredCallback, enable_local_steps
from lightning_gqsgd.frameworks.versions import check_version
from lightning_gqsgd.presets import make_config
from lightning_gqsgd.wire.announcing import print_to_stderr
from lightning_gqsgd.wire.telemetry import Meter

check_version("transformers")


class GQSGDCallback(MeteredCallback):
    """Logs the hook's counters, and saves and restores its state."""

    state_file = "gqsgd.pt"

    def __init__(self, trainer: Trainer, handler: GQSGDKwargs) -> None:
        super().__init__(trainer)
        self._handler = handler
        self._hook: GQSGDState | None = None  # that of the model in training; None: there is one process
        self._reduced = 0  # the hook's step when the optimizer made its latest one

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore, and count from here: the model has just been wrapped.

        Raises:
            ConfigError: the Trainer does not use the hook, or ranks see different checkpoints.
        """
        self._hook = self._hook_in_use()
        saved = self.read()
        if self.resumes_from is not None:
            self._handler.load_state_dict({"states": []} if saved is None else saved)
        if self._hook is not None:
            self._reduced = self._hook.step
            self._meter = Meter(self._hook.telemetry)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that the gradients have come to the hook.

        Raises:
            ConfigError: gradients were computed around DistributedDataParallel since the optimizer's step before.
        """
        hook = self._hook
        if hook is None:
            return
        # Steps of plain DDP are counted later, and the hook itself raises where DDP waits.
        has_come = hook.step != self._reduced or hook.is_plain or hook.is_waiting
        self._reduced = hook.step
        if not has_come and any(p.grad is not None for p in kwargs["model"].parameters()):
            raise ConfigError(
                f"the gradients of step {state.global_step} have not come to DistributedDataParallel, so each rank "
                "would train its own. Let compute_loss and training_step call the model that they are given, not "
                "self.model, and call backward() once for each of its forward passes"
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report bytes, bits and waiting on rank 0."""
        if self._hook is not None and state.is_world_process_zero and self._hook.telemetry.steps:
            print_to_stderr(self._hook.summary_line())

    def save(self, folder: Path) -> None:
        self.write(self._handler.state_dict(), folder)

    def _hook_in_use(self) -> GQSGDState | None:
        """Returns the state of the hook on the model that the Trainer trains; None: there is one process."""
        accelerator = self._trainer.accelerator
        if accelerator.ddp_handler is not self._handler:
            raise ConfigError(
                "the Trainer has made a new Accelerator since gqsgd was enabled (hyperparameter_search does in every "
                "trial), so gradients are not compressed; train each trial with a Trainer of its own"
            )
        if accelerator.num_processes == 1:
            return None
        # Hooks may live on models that the Trainer trains no more. torch.compile puts a module around DDP.
        model = ddp_in(self._trainer.model_wrapped)
        if model is None:
            raise ConfigError(
                "the Trainer has not wrapped its model in DistributedDataParallel, so each process would train on its "
                "own; it leaves that out after `evaluate` or `predict`: call them after `train`, or set "
                "TrainingArguments(eval_on_start=True). It also does where trainer.model was replaced, as by an "
                "adapter's model: give the Trainer that model, or set trainer.model_wrapped to it, too"
            )
        hook = self._handler.keep_only(model)
        if hook is None:
            raise ConfigError(
                "the Trainer trains a DistributedDataParallel model that it has not wrapped itself, so its gradients "
                "are not compressed; give the Trainer the module itself"
            )
        return hook


def enable_trainer(
    trainer: Trainer, preset: str | GQSGDConfig | None = None, **fields: Any
) -> GQSGDKwargs | LocalStepsCallback | FSDPCallback:
    """Enable compression on a ``transformers.Trainer``; see `enable.enable`."""
    local, compression = LocalTraining.asked_for(preset, fields)
    if local is not None:
        fields.pop("timeout", None)  # `local` has it
        steps = enable_local_steps(trainer, local, make_config(compression, **fields))
        _add(trainer, steps)
        return steps
    if trainer.accelerator.is_fsdp2:
        sharded = enable_fsdp(trainer, compression, **fields)
        _add(trainer, sharded)
        return sharded
    handler = enable_accelerator(trainer.accelerator, preset, trainer.model, **fields)
    _add(trainer, GQSGDCallback(trainer, handler))
    return handler


def _add(trainer: Trainer, callback: MeteredCallback) -> None:
    """Add a callback to a Trainer, in front of those that print and upload logs."""
    trainer.callback_handler.callbacks.insert(0, callback)
    _tell_what_is_resumed(trainer, callback)
    _save_with_checkpoints(trainer, callback)


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


def _save_with_checkpoints(trainer: Trainer, callback: MeteredCallback) -> None:
    """Let a callback add its state to all checkpoints that training can resume from.

    The event ``on_save`` never comes for a checkpoint that SIGTERM asks for (``enable_jit_checkpoint``). For other
    checkpoints it comes after they were pushed to the Hub.
    """
    save = trainer._save_checkpoint

    @functools.wraps(save)
    def save_with_state(model: Any, trial: Any = None, *args: Any, **kwargs: Any) -> Any:
        folder = Path(trainer._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        if trainer.args.should_save:
            # An earlier training may have left them. The Trainer overwrites its own files only.
            for kind in (GQSGDCallback, LocalStepsCallback, FSDPCallback):
                (folder / kind.state_file).unlink(missing_ok=True)
            # It is written last, and transformers does not resume from a checkpoint without it.
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        if not trainer.args.save_only_model:
            callback.save(folder)
        return save(model, trial, *args, **kwargs)

    trainer._save_checkpoint = save_with_state  # type: ignore[method-assign]
