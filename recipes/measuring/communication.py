"""Bytes of gradients that left this process."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from recipes.measuring import names
from recipes.measuring.clock import is_logging_step
from recipes.strategies.baselines import BaselineDDPStrategy


class CommunicationCounter(Callback):
    """Logs ``comm/mb_sent``: 10^6 bytes of gradients that this process has sent since the start of training.

    For baselines, this is the ring's 2 (n - 1) / n times the bytes of the gradients on the wire. The strategy of the
    package counts what it sends. The total is part of the checkpoint.

    Args:
        strategy: what sends the gradients, in words.

    Attributes:
        bytes_sent: the total in bytes, that of resumed runs included.
        coordinates: number of gradient coordinates that were reduced in the same steps.
        strategies: what has sent them: the strategies of resumed runs, where they were others, and that of this one.
    """

    def __init__(self, strategy: str) -> None:
        self.strategies = [strategy]
        self.bytes_sent = 0.0
        self.coordinates = 0
        self._total_read = 0.0  # the strategy's own total when it was read last
        self._steps_read = 0  # optimizer steps at the end of the last batch
        self._strategy: Any = None

    def bits_per_coordinate(self, processes: int) -> float | None:
        """Bits on the wire per coordinate: 8 x bytes sent over what a ring would send of 1 bit per coordinate; None if
        nothing was sent, as in a run of one process."""
        ring = ring_factor(processes) * self.coordinates
        return 8 * self.bytes_sent / ring if ring else None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the coordinates of a gradient, and what is sent from here on."""
        self._strategy = trainer.strategy
        self._total_read = self._total() or 0.0
        self._steps_read = trainer.global_step
        self._numel = sum(p.numel() for p in pl_module.parameters() if p.requires_grad)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count an optimizer step, and log the total where Lightning writes a row."""
        steps, self._steps_read = trainer.global_step - self._steps_read, trainer.global_step
        if steps:
            self.coordinates += self._numel
            if isinstance(trainer.strategy, BaselineDDPStrategy):
                self.bytes_sent += trainer.strategy.bytes_sent_in_step(ring_factor(trainer.world_size))
        if is_logging_step(trainer):
            self._read()
            pl_module.log(names.MB_SENT, self.bytes_sent / 1e6)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the total in the row of the metric."""
        self._read()
        pl_module.log(names.MB_SENT, self.bytes_sent / 1e6)

    on_test_epoch_end = on_validation_epoch_end

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the strategy's total for the last time."""
        self._read()

    def state_dict(self) -> dict[str, Any]:
        """The totals, for a checkpoint."""
        self._read()
        return {"bytes_sent": self.bytes_sent, "coordinates": self.coordinates, "strategies": self.strategies}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the totals of a checkpoint."""
        self.bytes_sent, self.coordinates = state_dict["bytes_sent"], state_dict["coordinates"]
        earlier = state_dict.get("strategies", [])  # earlier versions have not written them
        self.strategies = earlier if earlier[-1:] == self.strategies else [*earlier, *self.strategies]

    def _read(self) -> None:
        """Add what the strategy of the package has sent since the last reading; baselines have no total."""
        total = self._total()
        if total is None:
            return
        self.bytes_sent += total - self._total_read
        self._total_read = total

    def _total(self) -> float | None:
        """Bytes that the strategy of the package has sent; None for another strategy.

        The logged total is no substitute: it is as old as the last logged row.
        """
        state = getattr(self._strategy, "gqsgd_state", None)
        return None if state is None else float(state.telemetry.totals()["bytes_sent"])


def ring_factor(processes: int) -> float:
    """Bytes that a process sends in a ring all-reduce, over the bytes of the message: 2 (n - 1) / n."""
    return 2 * (processes - 1) / processes
