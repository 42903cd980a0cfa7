"""Random operations of the public surface on two ranks: equal bits on all ranks, or an exception on all ranks in time.

A driver draws operations from a seed. Some of them are wrong on one rank. After each one, either both ranks have the
same bits, or both raised within the process group's timeout and 10 seconds. After every failure, the driver wraps the
model anew and registers the hook, which has to work.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_gqsgd.presets import make_config
from tests.reliability.knobs import chance, scaled
from tests.reliability.one_rank import OneRank
from tests.reliability.pool import Answer, Pool

#: The process group's timeout, and what it takes beyond it at most, in seconds.
TIMEOUT_S, BEYOND_S = 5.0, 10.0
#: Seconds in which a rank answers at all, also where it compiles kernels.
ANSWER_S = 300.0
ELIAS: dict[str, Any] = {"coder": "elias", "reducer": "gather", "dither": "stochastic"}
#: What the hook may be registered with.
HOOKS: list[dict[str, Any]] = [
    {},
    {"bits": 4},
    {"preset": "gqsgd_4bit"},
    {"reducer": "sum", "bits": 6},
    {"reducer": "two_shot"},
    {"reducer": "native"},
    {"preset": "signsgd_ef"},
    {"codec": "linear", "memory": "diana", "reducer": "two_shot", "memory_down": "ef21"},
    ELIAS,
    {"codec": "exponential", "reducer": "tree"},
    {"codec": "eden", "bits": 2},
    {"warmup_steps": 3},
    {"sample_every": 1},
    {"auto": True},
    {"codec": "float"},
]
BAD_HOOKS: list[dict[str, Any]] = [
    {"bits": 99},
    {"bit": 4},
    {"exclude": ["*.nothing"]},
    {"codec": "sign"},
    {"preset": "no such preset"},
    {"block_size": 17},
    {"bits": "8"},
]
CHANGES = ["truncated", "schema", "seed", "step"]


class Violation(AssertionError):
    """What the state machine promises was not kept; the message has the operations that led there."""


class Machine:
    """Draws operations, and checks what they give."""

    def __init__(self, pool: Pool, numbers: random.Random) -> None:
        self._pool, self._numbers = pool, numbers
        self._history: list[str] = []
        self._saved: list[tuple[dict[str, Any], bytes]] = []
        self._hook: dict[str, Any] = {}
        self.counts: Counter[str] = Counter()

    def run(self, operations: int) -> None:
        """Draw and do so many operations."""
        self.start_anew()
        for _ in range(operations):
            name = self._numbers.choice(OPERATIONS)
            getattr(self, name)()
            self.counts[name] += 1

    # --- asking ranks -------------------------------------------------------------------------------------------------

    def ask(self, name: str, *differences: dict[str, Any], **arguments: Any) -> list[Answer]:
        """Let both ranks do an operation; ``differences``: arguments of each rank that differ."""
        own = differences or ({}, {})
        self._history.append(f"{name}({', '.join(_short(key, value) for key, value in arguments.items())}) {own}")
        operations = [(name, {**arguments, **mine}) for mine in own]
        answers = [answer for answer in self._pool.call(operations, within_s=ANSWER_S) if answer is not None]
        self._check_time(name, answers)
        return answers

    def alone(self, name: str, rank: int, **arguments: Any) -> Answer:
        """Let one rank do an operation while the other does nothing."""
        self._history.append(f"{name}({', '.join(_short(key, value) for key, value in arguments.items())}) on {rank}")
        operations = [(name, arguments) if number == rank else None for number in range(2)]
        answer = self._pool.call(operations, within_s=ANSWER_S)[rank]
        assert answer is not None
        self._check_time(name, [answer])
        return answer

    def _check_time(self, name: str, answers: list[Answer]) -> None:
        """Errors come in time. What works may take longer, because kernels have to be compiled."""
        slowest = max(answer.seconds for answer in answers if answer.error) if any(a.error for a in answers) else 0.0
        if slowest > TIMEOUT_S + BEYOND_S:
            self.fail(f"the error of {name} took {slowest:.0f} s", answers)

    def fail(self, what: str, answers: list[Answer] | None = None) -> None:
        """Raise Violation."""
        lines = [
            f"rank {rank}: {answer.error or 'no error'} after {answer.seconds:.1f} s\n{answer.trace}"
            for rank, answer in enumerate(answers or [])
        ]
        raise Violation("\n".join([what, *lines, "operations:", *self._history[-30:]]))

    def must_work(self, name: str, *differences: dict[str, Any], **arguments: Any) -> list[Answer]:
        """An operation that has to work on both ranks, and to give the same."""
        answers = self.ask(name, *differences, **arguments)
        if any(answer.error for answer in answers):
            self.fail(f"{name} has to work", answers)
        if name not in ("save",) and answers[0].value != answers[1].value:
            self.fail(f"{name} gave {answers[0].value} and {answers[1].value}", answers)
        return answers

    def must_fail(self, name: str, *differences: dict[str, Any], **arguments: Any) -> list[Answer]:
        """An operation that has to raise on both ranks."""
        answers = self.ask(name, *differences, **arguments)
        if not all(answer.error for answer in answers):
            self.fail(f"{name} has to raise on both ranks", answers)
        return answers

    # --- operations ---------------------------------------------------------------------------------------------------

    def start_anew(self) -> None:
        """A new model with a hook."""
        self.must_work("wrap")
        self._hook = self._numbers.choice(HOOKS)
        self.must_work("register", fields=self._hook)
        self.must_work("train", steps=self._numbers.randrange(1, 4))

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

    def train(self) -> None:
        """Some steps."""
        self.must_work("train", steps=self._numbers.randrange(1, 4), accumulate=self._numbers.random() < 0.3)

    def fail_in_training(self) -> None:
        """An exception on one rank, or on both."""
        where, ranks = self._numbers.choice(["forward", "backward", "hook"]), self._numbers.choice([[0], [1], [0, 1]])
        steps = self._numbers.randrange(1, 3)
        mine = ({"fails_in": where if rank in ranks else ""} for rank in range(2))
        answers = self.must_fail("train", *mine, steps=steps)
        if self._numbers.random() < 0.5:
            self.ask("close")
        # In a model's second step, DDP itself compares its new buckets over the default group, whose connections Gloo
        # closes for good where that comes to its timeout.
        if any("_rebuild_buckets" in answer.trace for answer in answers):
            self.must_work("reinitialise")
        self.start_anew()

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
        self.save()
        hook, data = self._saved[-1]
        change, ranks = self._numbers.choice(CHANGES), self._numbers.choice([[0], [1], [0, 1]])
        answers = self.ask("load", *({"change": change if rank in ranks else ""} for rank in range(2)), data=data)
        raised = [rank for rank, answer in enumerate(answers) if answer.error]
        if raised != (ranks if change in ("truncated", "schema") else []):
            self.fail(f"change {change!r} on ranks {ranks}", answers)
        # With a memory, ranks are told that only one of them has loaded a state, even if it is the state they had.
        remembers = make_config(**hook).remembers
        differ = remembers if raised else hook.get("reducer") != "native"
        if len(ranks) == 1 and differ:
            self.must_fail("train", steps=1)
            self.start_anew()
        elif (
            change in ("truncated", "schema") or hook.get("reducer") != "native"
        ):  # refused whole: the state is as it was
            self.must_work("train", steps=1)
        else:
            self.start_anew()

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

    def copies(self) -> None:
        """Copies, pickles, saves."""
        self.must_work("copies")
        self.must_work("train", steps=1)

    def fork(self) -> None:
        """A child that uses nothing."""
        self.must_work("fork")
        self.must_work("train", steps=1)

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
        self.must_work("reinitialise")
        self.must_work("reduce", numels=[2000], dtypes=["float32"], fields={}, at_once=False)
        self.start_anew()


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
)


def _short(key: str, value: Any) -> str:
    return f"{key}={len(value)} bytes" if isinstance(value, bytes) else f"{key}={value!r}"


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    made = Pool(OneRank, 2, tmp_path, TIMEOUT_S)
    yield made
    made.close()


def check_rest(pool: Pool, machine: Machine) -> None:
    """After everything is dropped and closed, nothing is left over of it."""
    machine.must_work("drop")
    machine.must_work("close_all_reduce")
    for answer in machine.ask("rest"):
        assert answer.value["sequencers"] == 0, answer.value
        assert answer.value["threads"] < 60, answer.value
        assert answer.value["files"] < 200, answer.value


@pytest.mark.slow
def test_each_operation_of_the_state_machine_works_once(pool: Pool) -> None:
    machine = Machine(pool, chance("each operation"))
    machine.start_anew()
    waits = {"fail_in_training", "register_alone", "close_alone", "reduce_alone"}  # for the timeout
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
