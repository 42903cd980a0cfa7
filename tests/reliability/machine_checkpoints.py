"""The state machine's operations on checkpoints, on copies of the model, and on a second model beside it."""

from __future__ import annotations

from typing import Any

from lightning_gqsgd.presets import make_config
from tests.reliability.changes import (
    CHANGES,
    EMPTYING,
    OF_MEMORY,
    OF_STEPS,
    REFUSED,
    REFUSED_WITH_MEMORY,
)
from tests.reliability.machine import HOOKS, Asking
from tests.reliability.one_rank import NOTHING_REMEMBERED

#: Hooks with a memory, which has more to go wrong than a seed and a step.
REMEMBERING = [hook for hook in HOOKS if make_config(**hook).remembers]
#: Models whose states a run loads by mistake, and whether a hook with a memory can take what they remember.
FOREIGN: list[tuple[dict[str, int], bool]] = [
    ({"width": 48}, False),
    ({"width": 64, "depth": 4}, False),
    ({"width": 64, "depth": 2}, True),  # it remembers the first layer, which is the same
]


class Keeping(Asking):
    """Saves, loads and copies models, and trains a second one."""

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """A checkpoint."""
        answers = self.must_work("save")
        self._saved.append((self._hook, answers[0].value))
        self._saved = self._saved[-5:]

    def load(self) -> None:
        """A checkpoint of this run, of an earlier one, or of another hook."""
        if not self._saved:
            return
        hook, data = self._numbers.choice(self._saved)
        answers = self.ask("load", data=data)
        errors = [bool(answer.error) for answer in answers]
        if any(errors) and (not all(errors) or hook == self._hook):
            self.fail("load has to work, or to be refused by both ranks", answers)
        self.must_work("train", steps=2)

    def load_badly(self) -> None:
        """A checkpoint that is changed on both ranks, or on one."""
        self._remember_at_times()
        self.load_changed(self._numbers.choice(CHANGES), self._numbers.choice([[0], [1], [0, 1]]))

    def load_changed(self, change: str, ranks: list[int]) -> None:
        """A checkpoint with a change on some ranks. Each rank takes all of it, or refuses all of it."""
        self.save()
        hook, data = self._saved[-1]
        remembers = make_config(**hook).remembers
        kept = [answer.value for answer in self.must_work("remembered")]
        answers = self.ask("load", *({"change": change if rank in ranks else ""} for rank in range(2)), data=data)
        raised = [rank for rank, answer in enumerate(answers) if answer.error]
        is_refused = change in REFUSED or (remembers and change in REFUSED_WITH_MEMORY)
        if raised != (ranks if is_refused else []):
            self.fail(f"change {change!r} on ranks {ranks}", answers)
        if remembers and change in EMPTYING:
            kept = [NOTHING_REMEMBERED if rank in ranks else of_rank for rank, of_rank in enumerate(kept)]
        self._check_remembered(kept)
        self._train_after(change, ranks, is_refused, remembers)

    def _train_after(self, change: str, ranks: list[int], is_refused: bool, remembers: bool) -> None:
        """Training fails on both ranks where one of them has another state now, and works otherwise."""
        compares = self._hook.get("reducer") != "native"
        # With a memory, ranks are told that only one of them has loaded a state, even if it is the state they had.
        differ = remembers if is_refused or change in OF_MEMORY else compares and change in OF_STEPS
        if len(ranks) == 1 and differ:
            self.must_fail("train", steps=1)
            self.start_anew()
            return
        self.must_work("train", steps=1)
        if change in OF_STEPS and not compares:  # ranks count otherwise, and nothing has told them
            self.start_anew()

    def load_foreign(self) -> None:
        """The state of another model that has the same hook."""
        self._remember_at_times()
        shape, fits = self._numbers.choice(FOREIGN)
        (first, _) = self.must_work("save_another", fields=self._hook, **shape)
        kept = [answer.value for answer in self.must_work("remembered")]
        answers = self.ask("load", data=first.value, hook_only=True)
        is_refused = make_config(**self._hook).remembers and not fits
        if [answer.error.startswith("ConfigError") for answer in answers] != [is_refused] * 2:
            self.fail(f"the state of another model, {shape}", answers)
        if is_refused:
            self._check_remembered(kept)
        self.must_work("train", steps=2)

    def _remember_at_times(self) -> None:
        if self._numbers.random() < 0.5:
            self.start_anew(REMEMBERING)

    def _check_remembered(self, expected: list[str]) -> None:
        answers = self.must_work("remembered")
        if [answer.value for answer in answers] != expected:
            self.fail(f"ranks remember {[answer.value for answer in answers]}, not {expected}")

    # --- copies -------------------------------------------------------------------------------------------------------

    def copies(self) -> None:
        """Copies, pickles, saves."""
        self.must_work("copies")
        self.must_work("train", steps=1)

    def train_a_copy(self) -> None:
        """A copy, which is trained as well as its original."""
        self.must_work("train_a_copy", count=self._numbers.randrange(1, 4), fields=self._numbers.choice(HOOKS))
        self.must_work("train", steps=1)

    def fork(self) -> None:
        """A child that uses nothing."""
        self.must_work("fork")
        self.must_work("train", steps=1)

    def spawn(self) -> None:
        """A child that is started anew, and uses the model without the ranks."""
        self.must_work("spawn")
        self.must_work("train", steps=1)

    # --- a second model -----------------------------------------------------------------------------------------------

    def train_two(self) -> None:
        """Two models with hooks in turns. The second one stays for later operations, and outlives the first one."""
        if not self._has_second or self._numbers.random() < 0.3:
            self.must_work("make_second", fields=self._numbers.choice(HOOKS))
            self._has_second = True
        turns: list[Any] = [self._numbers.randrange(2) for _ in range(self._numbers.randrange(2, 6))]
        self.must_work("train_two", turns=turns)
