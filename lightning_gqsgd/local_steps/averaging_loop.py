"""The order in which averages are started and used, for processes and for virtual workers.

A subclass implements how an average is started, waited for and applied: `averages.LocalAverages` over process groups,
`research.simulation.local.LocalWorkers` in one process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from lightning_gqsgd.local_steps.fragments import Fragment
from lightning_gqsgd.local_steps.options import LocalOptions
from lightning_gqsgd.local_steps.schedule import Rounds


@dataclass(eq=False)
class Pending:
    """An average that was started and not used yet.

    Attributes:
        fragment: number of the fragment.
        use_after: the step after which it is used.
        is_last: whether the average ends a round early. Then the anchor becomes the mean of the ranks' models.
    """

    fragment: int
    use_after: int
    is_last: bool = field(default=False, kw_only=True)


AnyPending = TypeVar("AnyPending", bound=Pending)


class AveragingLoop(ABC, Generic[AnyPending]):
    """Counts optimizer steps; starts and uses averages when they are due.

    Attributes:
        options: when to average.
        fragments: the parts of the model, with their anchors.
        rounds: the rounds, which say when each fragment is averaged.
        under_way: the averages that were started and not used yet, oldest first.
        step: number of optimizer steps so far.
        averages: number of averages that were started.
        skipped: number of averages that were not used, because a rank's change was not finite.
        is_broken: whether an exception has ended the start of an average, the wait for it or its use, which other ranks
            may have made.
    """

    def __init__(self, options: LocalOptions, fragments: Sequence[Fragment]) -> None:
        self.options = options
        self.fragments = list(fragments)
        self.rounds = Rounds(options)
        self.under_way: list[AnyPending] = []
        self.step = self.averages = self.skipped = 0
        self.is_broken = False

    @torch.no_grad()
    def advance(self) -> None:
        """Count an optimizer step; use the averages whose delay is over, and start those that are due."""
        self.step += 1
        due = self.rounds.due_after(self.step)
        try:
            # If rounds get shorter, an average may be due although the previous one of its fragment is not used yet.
            under_way = self.under_way
            self._use([average for average in under_way if average.use_after <= self.step or average.fragment in due])
            for fragment in due:
                self._begin(fragment, self.options.delay)
            if not self.options.delay:
                self._use(self.under_way)
        finally:
            # Also if an average was refused, whose cause may be mended: the next round is as long as any other.
            self.rounds.end_step(self.step)

    @torch.no_grad()
    def finish(self) -> None:
        """Use the averages under way, and average the changes since; see `averages.LocalAverages.finish`."""
        self._use(self.under_way)
        for number, fragment in enumerate(self.fragments):
            if fragment.settled_after != self.step:
                self._begin(number, delay=0)
                self.under_way[-1].is_last = True
        self._use(self.under_way)
        self.rounds.begin_anew(self.step)

    def _begin(self, fragment: int, delay: int) -> None:
        """Start the average of a fragment, and count it."""
        self.under_way.append(self._start(fragment, delay))
        self.averages += 1

    def _use(self, averages: Sequence[AnyPending]) -> None:
        """Wait for some averages, and move the anchor by them, in the order in which they were started."""
        for average in list(averages):
            # Without a delay, a rank has made no step of its own since the average was started.
            weight = self.options.mixing if self.options.delay and not average.is_last else 0.0
            with self._or_broken():
                self._wait(average)
                is_finite = self._is_finite(average)
                self.under_way.remove(average)  # before it moves anything, so that no state has it twice
                if is_finite:
                    self._apply(average, weight)
                    # With a weight, ranks keep a part of their own values, also after a `_go_back` in this step.
                    self.fragments[average.fragment].settled_after = None if weight else self.step
                else:
                    self.skipped += 1
                    self._go_back(average)
                    for fragment in self.fragments:
                        fragment.settled_after = self.step

    @contextmanager
    def _or_broken(self) -> Iterator[None]:
        """Returns a context for what all ranks do with an average. If an exception leaves it, even from a signal
        handler, this object is broken, because other ranks may have gone on."""
        try:
            yield
        except BaseException:
            self.is_broken = True
            raise

    def _is_plain(self, average: AnyPending) -> bool:
        """Returns whether an average makes the anchor the mean of the ranks' models, without the outer optimizer."""
        return average.is_last or self.options.leaves_outer_out(average.use_after - self.options.delay)

    @abstractmethod
    def _start(self, number: int, delay: int) -> AnyPending:
        """Start the average of a fragment. It is used ``delay`` steps later."""

    @abstractmethod
    def _wait(self, average: AnyPending) -> None:
        """Wait for the mean."""

    @abstractmethod
    def _is_finite(self, average: AnyPending) -> bool:
        """Returns whether the whole mean is finite, which is the same on all ranks. Waits for a GPU."""

    @abstractmethod
    def _apply(self, average: AnyPending, weight: float) -> None:
        """Move a fragment's anchor by its mean change, and the parameters to the anchor.

        ``weight`` is the weight of the parameters' own values, see `Fragment.set_tensors`.
        """

    @abstractmethod
    def _go_back(self, average: AnyPending) -> None:
        """Skip an average, and return to the anchors of all fragments, because later changes may be NaN."""
