"""What the state machine's operations have in common: asking both ranks, and what their answers have to be."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.reliability.pool import Answer, Pool

#: The process group's timeout, and what it takes beyond it at most, in seconds.
TIMEOUT_S, BEYOND_S = 5.0, 10.0
#: Seconds in which a rank answers at all, also where it compiles kernels.
ANSWER_S = 300.0
ELIAS: dict[str, Any] = {"coder": "elias", "reducer": "gather", "dither": "stochastic"}
#: Operations whose results differ between ranks.
GIVE_EACH_RANKS_OWN = ("save", "save_another", "remembered")
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


class Violation(AssertionError):
    """What the state machine promises was not kept; the message has the operations that led there."""


class Asking:
    """Asks ranks to do operations, and checks what they give."""

    def __init__(self, pool: Pool, numbers: random.Random) -> None:
        self._pool, self._numbers = pool, numbers
        self._history: list[str] = []
        self._saved: list[tuple[dict[str, Any], bytes]] = []
        self._hook: dict[str, Any] = {}
        self._has_second = False
        self.counts: Counter[str] = Counter()

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
        if name not in GIVE_EACH_RANKS_OWN and answers[0].value != answers[1].value:
            self.fail(f"{name} gave {answers[0].value} and {answers[1].value}", answers)
        return answers

    def must_fail(self, name: str, *differences: dict[str, Any], **arguments: Any) -> list[Answer]:
        """An operation that has to raise on both ranks."""
        answers = self.ask(name, *differences, **arguments)
        if not all(answer.error for answer in answers):
            self.fail(f"{name} has to raise on both ranks", answers)
        return answers

    def start_anew(self, hooks: Sequence[dict[str, Any]] = HOOKS) -> None:
        """A new model with one of some hooks."""
        self.must_work("wrap")
        self._hook = self._numbers.choice(hooks)
        self.must_work("register", fields=self._hook)
        self.must_work("train", steps=self._numbers.randrange(1, 4))


def _short(key: str, value: Any) -> str:
    return f"{key}={len(value)} bytes" if isinstance(value, bytes) else f"{key}={value!r}"
