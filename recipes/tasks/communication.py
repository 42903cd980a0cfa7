"""Bytes of gradients that left this process."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from recipes.tasks import names
from recipes.tasks.baselines import BaselineDDPStrategy
from recipes.tasks.clock import is_logging_step


class CommunicationCounter(Callback):
    """Logs ``comm/mb_sent``, 10^6 bytes of gradients sent by this process since the start of training.

    Baselines count the ring's 2 (n - 1) / n times the bytes of the gradients on the wire; gqsgd counts what it sent.
    The total is part of the checkpoint.

    Attributes:
        bytes_sent: the total in bytes, resumed parts included.
        coordinates: gradient coordinates reduced in the same steps.
    """

    def __init__(self) -> None:
        self.bytes_sent = 0.0
        self.coordinates = 0
        self._seen = 0.0  # gqsgd's own total at the latest reading
        self._steps = 0  # optimizer steps at the latest reading

    def bits_per_coordinate(self, processes: int) -> float | None:
        """Bits on the wire per coordinate: bytes sent over those of a ring with 1 bit; None if nothing was sent."""
        ring = ring_factor(processes) * self.coordinates
        return 8 * self.bytes_sent / ring if ring else None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps = trainer.global_step
        self._numel = sum(p.numel() for p in pl_module.parameters() if p.requires_grad)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        steps, self._steps = trainer.global_step - self._steps, trainer.global_step
        if steps:
            self.coordinates += self._numel
            if isinstance(trainer.strategy, BaselineDDPStrategy):
                self.bytes_sent += trainer.strategy.bytes_sent_in_step(ring_factor(trainer.world_size))
        if is_logging_step(trainer):
            self._read(trainer)
            pl_module.log(names.MB_SENT, self.bytes_sent / 1e6)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read(trainer)
        pl_module.log(names.MB_SENT, self.bytes_sent / 1e6)

    on_test_epoch_end = on_validation_epoch_end

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"bytes_sent": self.bytes_sent, "coordinates": self.coordinates, "seen": self._seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.bytes_sent, self.coordinates = state_dict["bytes_sent"], state_dict["coordinates"]
        self._seen = state_dict["seen"]

    def _read(self, trainer: Trainer) -> None:
        total = trainer.callback_metrics.get(names.BYTES_SENT)
        if total is None:
            return
        # The strategy's total grows, or starts again at zero in a resumed run.
        now = float(total)
        self.bytes_sent += now - self._seen if now >= self._seen else now
        self._seen = now


def ring_factor(processes: int) -> float:
    """Bytes that a process sends in a ring allreduce over the bytes of the message: 2 (n - 1) / n."""
    return 2 * (processes - 1) / processes
