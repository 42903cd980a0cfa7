"""Random operations of the public surface on two ranks: equal bits on all ranks, or an exception on all ranks in time.

A driver draws operations from a seed. Some of them are wrong on one rank. After each one, either both ranks have the
same bits, or both raised within the process group's timeout and 10 seconds. After every failure, the driver wraps the
model anew and registers the hook, which has to work.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.knobs import chance, scaled
from tests.reliability.machine import ELIAS, HOOKS, TIMEOUT_S
from tests.reliability.machine_checkpoints import Keeping
from tests.reliability.one_rank import OneRank
from tests.reliability.pool import Pool

#: Hooks of parameters that fail; see `OneRank._failing_hook`.
PARAMETER_HOOKS = ["hook", "last hook", "accumulated"]
BAD_HOOKS: list[dict[str, Any]] = [
    {"bits": 99},
    {"bit": 4},
    {"exclude": ["*.nothing"]},
    {"codec": "sign"},
    {"preset": "no such preset"},
    {"block_size": 17},
    {"bits": "8"},
]


class Machine(Keeping):
    """Draws operations, and checks what they give."""

    def run(self, operations: int) -> None:
        """Draw and do so many operations."""
        self.start_anew()
        for _ in range(operations):
            name = self._numbers.choice(OPERATIONS)
            getattr(self, name)()
            self.counts[name] += 1

    def register_badly(self) -> None:
        """One rank has bad fields, or other ones."""
        self.must_work("wrap")
        rank, bad = self._numbers.randrange(2), self._numbers.choice(BAD_HOOKS)
        good = self._numbers.choice(HOOKS)
        if self._numbers.random() < 0.5:
            bad = {**good, "seed": 12345}
        mine = [{"fields": bad if number == rank else good} for number in range(2)]
        self.must_fail("register", *mine)
        self.must_work("register", fields=good)  # the same model, with good fields
        self.must_work("train", steps=1)
        self._hook = good

    def register_alone(self) -> None:
        """One rank registers, and the other does not."""
        self.must_work("wrap")
        answer = self.alone("register", self._numbers.randrange(2), fields={})
        if "CollectiveError" not in answer.error:
            self.fail("registering alone has to raise CollectiveError", [answer])
        self.start_anew()

    def register_twice(self) -> None:
        """A model that has a hook, on both ranks or on one; the hook that it has goes on, unless it was closed."""
        is_closed = self._numbers.random() < 0.3
        if is_closed:
            self.must_work("close")
        answers = self.must_fail("register", fields=self._numbers.choice(HOOKS))
        if not all("the model already has the communication hook" in answer.error for answer in answers):
            self.fail("registering twice has to be refused", answers)
        if is_closed:
            self.start_anew()
        self.must_work("train", steps=1)

    def register_beside_another(self) -> None:
        """The model of one rank has a hook of torch's, or both models have."""
        self.must_work("wrap")
        for rank in self._some_ranks():
            if self.alone("register_torchs", rank).error:
                self.fail("torch takes one hook")
        self.must_fail("register", fields=self._numbers.choice(HOOKS))
        self.start_anew()

    def train(self) -> None:
        """Some steps."""
        self.must_work("train", steps=self._numbers.randrange(1, 4), accumulate=self._numbers.random() < 0.3)

    def fail_in_training(self) -> None:
        """An exception on one rank, or on both."""
        self._fail(self._numbers.choice(["forward", "backward"]), self._some_ranks())

    def fail_in_a_hook(self) -> None:
        """An exception in an autograd hook of a parameter, on one rank or on both."""
        self._fail(self._numbers.choice(PARAMETER_HOOKS), self._some_ranks())

    def _fail(self, where: str, ranks: list[int]) -> None:
        steps = self._numbers.randrange(1, 3)
        mine = ({"fails_in": where if rank in ranks else ""} for rank in range(2))
        answers = self.must_fail("train", *mine, steps=steps)
        if self._numbers.random() < 0.5:
            self.ask("close")
        # In a model's second step, DDP itself compares its new buckets over the default group, whose connections Gloo
        # closes for good where that comes to its timeout.
        if any("_rebuild_buckets" in answer.trace for answer in answers):
            self._new_group()
        self.start_anew()

    def fail_without_sync(self) -> None:
        """An exception in a `no_sync` block, on one rank or on both. Nothing was sent, so training goes on."""
        where, ranks = self._numbers.choice(["forward", "backward", *PARAMETER_HOOKS]), self._some_ranks()
        mine = ({"fails_in": where if rank in ranks else ""} for rank in range(2))
        self.must_work("train_without_sync", *mine, zeroes=self._numbers.random() < 0.5)
        self.must_work("train", steps=1)

    def _some_ranks(self) -> list[int]:
        return self._numbers.choice([[0], [1], [0, 1]])

    def rewrap(self) -> None:
        """Freeze and unfreeze."""
        self.must_work("rewrap", freeze=True)
        self.must_work("train", steps=1)
        self.must_work("rewrap", freeze=False)
        self.must_work("train", steps=1)

    def rewrap_badly(self) -> None:
        """One rank freezes other parameters."""
        self.must_fail("rewrap", {"freeze": True}, {"freeze": False})
        self.start_anew()

    def close(self) -> None:
        """Close on both ranks; training fails then."""
        self.must_work("close")
        self.must_fail("train", steps=1)
        self.must_work("close")
        self.start_anew()

    def close_alone(self) -> None:
        """Close on one rank; training fails on both."""
        rank = self._numbers.randrange(2)
        if self.alone("close", rank).error:
            self.fail("closing has to work")
        self.must_fail("train", steps=1)
        self.start_anew()

    def drop(self) -> None:
        """The model goes away while the other rank keeps its own."""
        if self.alone("drop", self._numbers.randrange(2)).error:
            self.fail("dropping has to work")
        self.start_anew()

    def reduce(self) -> None:
        """Means of tensors."""
        count, numbers = self._numbers.randrange(1, 6), self._numbers
        numels = [numbers.choice([0, 1, 100, 5000, 70_000]) for _ in range(count)]
        dtypes = [numbers.choice(["float32", "float64", "bfloat16", "float16"]) for _ in range(count)]
        fields = numbers.choice(
            [
                {},
                {"bits": 4},
                {"reducer": "sum"},
                {"codec": "eden"},
                ELIAS,
            ]
        )
        self.must_work("reduce", numels=numels, dtypes=dtypes, fields=fields, at_once=numbers.random() < 0.5)

    def reduce_badly(self) -> None:
        """One rank has another shape, dtype or configuration."""
        at_once = self._numbers.random() < 0.5
        good: dict[str, Any] = {"numels": [3000, 5000], "dtypes": ["float32", "float32"], "fields": {}}
        bad = {**good, **self._numbers.choice(BAD_CALLS)}
        rank = self._numbers.randrange(2)
        self.must_fail("reduce", *(bad if number == rank else good for number in range(2)), at_once=at_once)
        if at_once:  # a rank that refuses its first call makes no second one, and the other rank has made it
            self.must_work("close_all_reduce")
        self.must_work("reduce", **good, at_once=at_once)
        self.must_work("train", steps=1)

    def reduce_alone(self) -> None:
        """One rank calls all_reduce, and the other does not."""
        rank = self._numbers.randrange(2)
        answer = self.alone("reduce", rank, numels=[2000], dtypes=["float32"], fields={}, at_once=False)
        if "CollectiveError" not in answer.error:
            self.fail("all_reduce alone has to raise CollectiveError", [answer])
        self.must_work("close_all_reduce")
        self.must_work("reduce", numels=[2000], dtypes=["float32"], fields={}, at_once=False)
        self.must_work("train", steps=1)

    def reinitialise(self) -> None:
        """Another process group; what belongs to the old one cannot be used any more."""
        if self._numbers.random() < 0.5:
            self.must_work("drop")
        self._new_group()
        self.must_work("reduce", numels=[2000], dtypes=["float32"], fields={}, at_once=False)
        self.start_anew()

    def _new_group(self) -> None:
        self.must_work("reinitialise")
        self._has_second = False


BAD_CALLS: list[dict[str, Any]] = [
    {"numels": [3000, 5001]},
    {"numels": [3001, 5000]},
    {"numels": [0, 5000]},
    {"dtypes": ["float32", "float64"]},
    {"dtypes": ["bfloat16", "float32"]},
    {"dtypes": ["int64", "float32"]},
    {"fields": {"bits": 4}},
    {"fields": {"bits": 99}},
    {"fields": {"step": 7}},
    {"fields": {"memory": "ef"}},
]
#: Operations, those more than once that are to come more often.
OPERATIONS = (
    ["train", "train", "train", "save", "save", "load", "load", "load_badly", "rewrap", "copies", "fork", "reduce"]
    + ["reduce", "start_anew", "register_badly", "register_badly", "reduce_badly", "reduce_badly", "rewrap_badly"]
    + ["close", "drop", "reinitialise", "fail_in_training", "fail_in_training"]
    + ["register_alone", "close_alone", "reduce_alone"]
    + ["load_badly", "load_foreign", "register_twice", "register_beside_another", "fail_in_a_hook"]
    + ["fail_without_sync", "fail_without_sync", "train_a_copy", "spawn", "train_two", "train_two", "train_two"]
)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    made = Pool(OneRank, 2, tmp_path, TIMEOUT_S)
    yield made
    made.close()


def check_rest(pool: Pool, machine: Machine) -> None:
    """After everything is dropped and closed, nothing is left over of it."""
    machine.must_work("drop")
    machine.must_work("drop_second")
    machine.must_work("close_all_reduce")
    for answer in machine.ask("rest"):
        assert answer.value["sequencers"] == 0, answer.value
        assert answer.value["threads"] < 60, answer.value
        assert answer.value["files"] < 200, answer.value


@pytest.mark.slow
def test_each_operation_of_the_state_machine_works_once(pool: Pool) -> None:
    machine = Machine(pool, chance("each operation"))
    machine.start_anew()
    waits = {"fail_in_training", "fail_in_a_hook", "register_alone", "close_alone", "reduce_alone"}  # for the timeout
    for name in dict.fromkeys(OPERATIONS):
        if name not in waits:
            getattr(machine, name)()
    check_rest(pool, machine)


@pytest.mark.reliability
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(2))
def test_ranks_have_equal_bits_or_all_raise_after_any_operations(pool: Pool, number: int) -> None:
    machine = Machine(pool, chance("state machine", number))
    machine.run(scaled(150))
    check_rest(pool, machine)
    print(dict(machine.counts))
