"""Members that are the ranks of a process group: all of them take part in every merge."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import CollectiveError
from lightning_gqsgd.membership.members import Commit, Meet, Members, Quorum, Rejoin, Request, RowsOfAll, SumOfAll
from lightning_gqsgd.wire.agreement import named
from lightning_gqsgd.wire.engine import Engine
from lightning_gqsgd.wire.engine import Request as EngineRequest


class FixedMembers(Members):
    """The ranks of an engine.

    Args:
        engine: engine of the ranks, with compiled kernels.
        config: the compression, with the chosen reducer.

    Attributes:
        config: see above.
    """

    waits_for_all = True

    def __init__(self, engine: Engine, config: GQSGDConfig) -> None:
        self._engine = engine
        self.config = config
        self.telemetry = engine.telemetry
        self.patience_s = engine.communicator.timeout.total_seconds()

    @torch.no_grad()
    def answer(self, request: Request) -> Any:
        """Answer one request; see `Members`.

        Raises:
            CollectiveError: if a collective failed. No further merge is possible then.
        """
        if isinstance(request, Meet):
            return Quorum(self._engine.rank)
        if isinstance(request, RowsOfAll):
            communicator = self._engine.communicator
            with self._beside():
                row = request.row.to(communicator.control_device)
                return communicator.gather(row, "gathering what ranks tell each other in a merge").cpu()
        if isinstance(request, SumOfAll):
            return self._sum(request)
        if isinstance(request, Commit) and not request.problem:
            return True
        assert isinstance(request, Commit | Rejoin)
        raise CollectiveError(
            f"gqsgd: rank {self._engine.rank} of {self._engine.world_size} finds that {request.problem}, and their "
            "exchanges do not explain why: the outer optimizer's hyperparameters may have been changed outside of a "
            "hook of its step (register_step_post_hook), in which all ranks change them in the same merge; or a state "
            "was loaded on some ranks only; or processors round differently. Load the same state on every rank, and "
            "make a new LocalSteps"
        )

    def leave_behind(self, idle: Mapping[int, str]) -> None:
        """Raise CollectiveError, because ranks of a process group cannot leave."""
        raise CollectiveError(
            f"gqsgd: finish() has waited for {named(list(idle), self._engine.communicator.numbers)} "
            f"({', '.join(idle.values())}), which made no step for {self.patience_s:.0f} s and did not call finish(): "
            "its training loop has ended early, has raised an error, or hangs. Look at its log. Every rank has to call "
            "finish() at the end, and close() if it gives up; if a rank is only slow, give a longer timeout"
        )

    def close(self) -> None:
        """Stop using threads and process groups."""
        self._engine.close()

    def _sum(self, request: SumOfAll) -> Tensor:
        asked = EngineRequest(
            name=f"sum {request.number} of a merge",
            configs=(self.config,),
            segments=request.segments,
            step=request.number,
        )
        job = self._engine.reduce(request.x, asked)
        with self._beside():
            mean = job.wait()
            if self._stream is not None:
                self._stream.synchronize()
        self._engine.plans.trim()
        return mean.mul_(self._engine.world_size)

    def _beside(self) -> AbstractContextManager[object]:
        """Returns the context of `_stream`. Does nothing if there is none."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    @cached_property
    def _stream(self) -> torch.cuda.Stream | None:
        """The stream that waits for the other ranks; None if the host does. All threads of a process have the same
        default stream, on which the model is trained during a merge."""
        device = self._engine.communicator.control_device
        return torch.cuda.Stream(device) if device.type == "cuda" else None
