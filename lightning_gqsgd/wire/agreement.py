"""Agreement: ranks compare cards of facts before they reduce, and stamps of a few numbers while they reduce.

A `Card` is compared before anything else is sent, because ranks with different facts would send messages of different
sizes, which aborts Gloo. A `Stamp` holds numbers that may differ although the ranks agreed once, for example because
one rank loaded a state. Every step has a stamp. Ranks compare stamps while the step's messages are under way, so the
comparison takes no extra time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lightning_gqsgd.errors import ConfigError, describe_difference
from lightning_gqsgd.reducers.base import Exchange
from lightning_gqsgd.wire.build import this_build

logger = logging.getLogger(__name__)

#: Bytes of a card on the wire: JSON, padded.
CARD_BYTES = 2048

#: Steps whose stamps are kept until they are taken.
STEPS_KEPT = 16

#: Numbers of a stamp's row that must be equal on all ranks, the first ones; the duration of the step follows them.
_EQUAL = 3

#: Weights that ranks compare in a step.
WEIGHTS_COMPARED = 8
#: Largest difference allowed between weights of two ranks, relative to the largest weight compared. Optimizers round
#: differently on different processors, and neighbouring bfloat16 numbers are up to 1/128 apart.
WEIGHTS_TOLERANCE = 1 / 32

#: Characters of an error message that are sent to other ranks, at most.
ERROR_LENGTH = 1000


@dataclass(frozen=True)
class Card:
    """The facts about the call that one rank is about to make. All ranks compare their cards.

    Attributes:
        purpose: the function that was called, for errors.
        facts: the facts that all ranks must have in common: plain values by name.
        error: why the rank refuses; empty if it does not refuse.
        is_own: whether the error arose on this rank; False if the rank heard of it in another process group.
        news: further values for the other ranks, plain values by name; they need not be equal.
        build: the build of the package that the rank runs, see `build.this_build`. It is compared before all others.
    """

    purpose: str
    facts: Mapping[str, Any]
    error: str = ""
    is_own: bool = True
    news: Mapping[str, Any] = field(default_factory=dict)
    build: str = field(default_factory=this_build)

    def to_json(self) -> str:
        """Returns the card as text, with an error cut to `ERROR_LENGTH` characters."""
        error = self.error[:ERROR_LENGTH]
        return json.dumps([self.build, self.purpose, self.facts, error, self.is_own, self.news], sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Card:
        """Parse a card. If the text is no card, return a card that refuses, because its rank runs another build."""
        unreadable = cls("", {}, f"its card cannot be read ({text:.100})", build=f"its card: {text:.100}")
        try:
            build, *others = json.loads(text)
        except (TypeError, ValueError, RecursionError):  # a text like "[[[[[..." is too deep to parse
            return unreadable
        fields = (*others, build)
        return cls(*fields) if tuple(map(type, fields)) == (str, dict, str, bool, dict, str) else unreadable


def verdict(cards: Sequence[Card], numbers: Sequence[int]) -> str:
    """Returns the reason why the cards of all ranks are incompatible; empty if they are compatible.

    Args:
        cards: in the order of ranks.
        numbers: the numbers of these ranks among all processes, see `named`.
    """
    # An error that a rank heard of in another group is the cause of the other errors, so it comes first, unchanged.
    heard = [card.error for card in cards if card.error and not card.is_own]
    if heard:
        return heard[0]
    # Two builds may have other facts for the same arguments, and refuse other arguments.
    foreign = [rank for rank, card in enumerate(cards) if card.build != cards[0].build]
    if foreign:
        return (
            f"{named(foreign, numbers)} {'runs' if len(foreign) == 1 else 'run'} another build of lightning-gqsgd "
            f"({cards[foreign[0]].build}) than {named([0], numbers)} ({cards[0].build}); install the same on all ranks"
        )
    refusing = {rank: card.error for rank, card in enumerate(cards) if card.error}
    if refusing:
        reason = next(iter(refusing.values()))
        return f"{named([rank for rank in refusing if refusing[rank] == reason], numbers)} refused: {reason}"
    first = cards[0]
    for rank, card in enumerate(cards):
        if card.purpose != first.purpose:
            return (
                f"{named([0], numbers)} calls {first.purpose} while {named([rank], numbers)} calls {card.purpose}; all "
                "ranks of a process group have to call the same functions in the same order"
            )
        if card.facts != first.facts:
            difference = describe_difference(dict(first.facts), dict(card.facts))
            return f"{named([0, rank], numbers)} do not agree: {difference}; give every rank the same"
    return ""


def named(ranks: Sequence[int], numbers: Sequence[int]) -> str:
    """Returns ranks of a process group in words, by their numbers among all processes. The words say so if these are
    not the numbers in the group.

    Args:
        ranks: numbers in the group.
        numbers: the numbers of the group's ranks among all processes, in the order of ranks.
    """
    words = ranks_in_words([numbers[rank] for rank in ranks])
    return words if not ranks or _are_all(numbers) else f"global {words}"


def one_of(rank: int, numbers: Sequence[int]) -> str:
    """Returns one rank of a process group in words, with the number of ranks; see `named` for the arguments."""
    words = f"rank {rank} of {len(numbers)}"
    return words if _are_all(numbers) else f"{words} (global rank {numbers[rank]})"


def _are_all(numbers: Sequence[int]) -> bool:
    """Returns whether the ranks of a group have the same numbers among all processes."""
    return list(numbers) == list(range(len(numbers)))


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Returns numbers of ranks in words, such as "ranks 0 and 3"."""
    if not ranks:
        return "the other ranks"
    if len(ranks) == 2:
        return f"ranks {ranks[0]} and {ranks[1]}"
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def compared(card: Card, numbers: Sequence[int], device: torch.device) -> Generator[Sequence[Exchange], None, int]:
    """Returns steps with one exchange that compares the cards of all ranks.

    Args:
        card: the card of this rank.
        numbers: see `verdict`.
        device: device of the messages.

    Raises:
        ConfigError: if a rank refuses, or if two ranks differ. It is raised on every rank, except on a rank that
            refuses itself, because that rank raises its own error.
    """
    mine = _sent_from_host(torch.frombuffer(bytearray(_padded(card)), dtype=torch.uint8), device)
    everyone = torch.empty(len(numbers), CARD_BYTES, dtype=torch.uint8, device=device)
    yield (Exchange("all_gather", everyone, mine),)
    # A rank that refuses itself has its own error to raise, which says more. On a GPU, it would wait here for the cards
    # of ranks that may not come.
    if card.error:
        return 0
    cards = [Card.from_json(bytes(row.tolist()).decode(errors="replace")) for row in everyone.cpu()]
    problem = verdict(cards, numbers)
    if problem:
        raise ConfigError(problem)
    return 0


def _padded(card: Card) -> bytes:
    """Returns the bytes of a card, padded to `CARD_BYTES`.

    If the facts are too long, such as long lists of patterns, a digest replaces them. If the error is still too long,
    it is cut: JSON writes a character that is not ASCII in 6 or 12 bytes.
    """
    text = card.to_json().encode()
    if len(text) > CARD_BYTES:
        digest = hashlib.sha256(text).hexdigest()
        card = replace(card, facts={"digest of a long configuration": digest})
        text = card.to_json().encode()
    length = ERROR_LENGTH
    while len(text) > CARD_BYTES:
        length //= 2
        text = replace(card, error=card.error[:length]).to_json().encode()
    return text.ljust(CARD_BYTES)


class Weights(NamedTuple):
    """Some weights of one parameter on this rank.

    Attributes:
        name: name of the parameter, for errors.
        values: the weights, float64 [`WEIGHTS_COMPARED`].
    """

    name: str
    values: Tensor

    @classmethod
    def of(cls, name: str, parameter: Tensor, step: int) -> Weights | None:
        """Returns some weights of a parameter, different ones in each step; None if the parameter is empty, not
        contiguous, not of a floating-point dtype, or of a tensor subclass."""
        is_plain = type(parameter) in (nn.Parameter, Tensor) and parameter.is_floating_point()
        if not is_plain or not parameter.is_contiguous() or not parameter.numel():
            return None
        # A slice is used, because a list of positions would have to be copied to the GPU.
        distance = -(-parameter.numel() // WEIGHTS_COMPARED)
        some = parameter.detach().view(-1)[step % distance :: distance].double()
        return cls(name, nn.functional.pad(some, (0, WEIGHTS_COMPARED - len(some))))


class Stamp(NamedTuple):
    """Numbers of a step, int64. The first three must be equal on all ranks.

    Attributes:
        seed: seed of the dither.
        step: number of the dither.
        digest: digest of all other facts (see `digest_of`).
        period_us: duration of the previous step on this rank in microseconds; 0 if there is none that counts.
        numbers: more numbers for the other ranks. All ranks send equally many.
        weights: some weights of a parameter, which should be equal on all ranks; None if this rank has none to compare.
    """

    seed: int
    step: int
    digest: int
    period_us: int = 0
    numbers: tuple[int, ...] = ()
    weights: Weights | None = None

    def row(self) -> list[int]:
        """Returns all numbers in one row, without the weights."""
        return [*self[:4], *self.numbers]

    @classmethod
    def from_row(cls, row: Sequence[int]) -> Stamp:
        """Returns the stamp, without weights, whose `row` this is."""
        seed, step, digest, period_us, *numbers = row
        return cls(seed, step, digest, period_us, tuple(numbers))


class StepCounter:
    """Counts the steps of a rank, and notes whether ranks have to compare the count before they send anything else.

    Attributes:
        number: number of the current step, or of the next one between steps.
        is_under_way: whether some buckets of a backward pass have arrived, but not the last one.
        compares_first: whether this rank compares its stamp before it sends anything else in the step, because its step
            or its messages may differ from those of other ranks.
    """

    def __init__(self) -> None:
        self.number = 0
        self.is_under_way = False
        self.compares_first = False

    def go_to(self, number: int) -> None:
        """Continue at another step."""
        self.number = number
        self.compares_first = True

    def end(self) -> None:
        """Continue at the next step, after the last bucket of this step has arrived."""
        self.number += 1
        self.compares_first = False


class Agreed(NamedTuple):
    """The numbers that all ranks know from the stamps of one step.

    Attributes:
        period_us: the longest ``period_us`` over ranks, or 0 if a rank has none.
        numbers: the `Stamp.numbers` of all ranks, in the order of ranks.
    """

    period_us: int
    numbers: tuple[tuple[int, ...], ...]


def digest_of(text: str) -> int:
    """Returns a digest of a text as an integer of 63 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


#: Why the stamps of hooks may differ, and what to do then.
STATE_DIFFERS = (
    "A state was loaded or changed on some ranks only: register the hook anew, and load the same state on every rank; "
    "or layers of the model have changed places on some ranks only: make the same change on every rank"
)


class StampCheck:
    """Compares the stamps of all ranks, step by step.

    If messages lie in host memory, a difference raises an error in that step, before the step's result is used. Over
    NCCL, the host would have to wait for the GPU before it reads the stamps. So it reads the stamps of a step when the
    next step begins; by then, the GPU has long received them.

    Args:
        numbers: the numbers of the ranks among all processes, see `named`.
        device: device of the messages that the host writes and reads.
        differ: why stamps may differ, and what to do then, for the error.
        says: whether this rank warns of weights that differ between ranks.
    """

    def __init__(
        self, numbers: Sequence[int], device: torch.device, differ: str = STATE_DIFFERS, *, says: bool = False
    ) -> None:
        self._numbers = numbers
        self._device = device
        self._differ = differ
        self._says = says
        self._unread: tuple[Tensor, torch.cuda.Event, str] | None = None
        self._agreed: dict[int, Agreed] = {}  # by step, until somebody takes them

    def _read(self, everyone: Tensor, name: str) -> None:
        """Read the stamps of all ranks, int64 [ranks, numbers] on the host; raises ConfigError if stamps differ.

        ``name`` is the name of the parameter whose weights are compared.
        """
        # With thousands of ranks, a Python object for each rank's stamp would take milliseconds in each step.
        rows = everyone.numpy()[:, :-WEIGHTS_COMPARED]
        if not (rows[:, :_EQUAL] == rows[0, :_EQUAL]).all():
            _check([Stamp.from_row(row) for row in rows.tolist()], self._differ, self._numbers)
        periods = rows[:, _EQUAL]
        # A step lasts as long as on the slowest rank. Every rank computes the same maximum.
        period_us = int(periods.max()) if periods.all() else 0
        numbers = tuple(map(tuple, rows[:, _EQUAL + 1 :].tolist()))
        self._agreed[int(rows[0, 1])] = Agreed(period_us, numbers)
        for step in list(self._agreed)[:-STEPS_KEPT]:
            del self._agreed[step]
        if self._says:
            weights = everyone[:, -WEIGHTS_COMPARED:].contiguous().view(torch.float64)
            difference = difference_of_weights(weights.numpy(), self._numbers)
            if difference:
                self._says = False  # once is enough: they differ from now on
                logger.warning("gqsgd: ranks have different weights: parameter %r %s", name, difference)

    def take(self, until_step: int) -> dict[int, Agreed]:
        """Return and forget the agreed numbers, by step. Only the latest `STEPS_KEPT` steps are kept."""
        return {step: self._agreed.pop(step) for step in sorted(self._agreed) if step <= until_step}

    def steps(self, stamp: Stamp, *, at_once: bool = False) -> Generator[Sequence[Exchange], None, int]:
        """Returns steps with one exchange that compares the stamps of all ranks.

        Args:
            stamp: the stamp of this rank.
            at_once: over NCCL, make the host wait for the GPU, so that it reads the stamps in this step.

        Raises:
            ConfigError: if stamps differ. It is raised on every rank.
        """
        self.read_sent()
        mine = _sent_from_host(torch.tensor(stamp.row(), dtype=torch.int64, device="cpu"), self._device)
        name = "" if stamp.weights is None else stamp.weights.name
        mine = torch.cat([mine, self._weights_of(stamp).view(torch.int64)])
        everyone = torch.empty(len(self._numbers), len(mine), dtype=torch.int64, device=self._device)
        yield (Exchange("all_gather", everyone, mine),)
        if self._device.type == "cuda":
            self._unread = (*_sent_to_host(everyone), name)
            if at_once:
                self.read_sent()
        else:
            self._read(everyone, name)
        return 0

    def _weights_of(self, stamp: Stamp) -> Tensor:
        # If weights are on a GPU and messages on the host, weights are not compared: the host would have to wait for
        # them.
        if stamp.weights is None or stamp.weights.values.device.type != self._device.type:
            return torch.full((WEIGHTS_COMPARED,), math.nan, dtype=torch.float64, device=self._device)
        values = stamp.weights.values
        if values.is_cuda:  # they were read on the caller's stream, which may use their memory again
            values.record_stream(torch.cuda.current_stream(values.device))
        return values

    def read_sent(self) -> None:
        """Read the stamps that are being copied from the GPU, if there are any. The host waits for the copy."""
        if self._unread is not None:
            numbers, event, name = self._unread
            # Forgotten first, so that the next call does not raise an error of `_read` again.
            self._unread = None
            event.synchronize()
            self._read(numbers, name)


def _sent_from_host(numbers: Tensor, device: torch.device) -> Tensor:
    """Returns the numbers on a device. A copy from pinned memory does not make the host wait for the GPU."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers


def _sent_to_host(everyone: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Returns a copy in pinned memory, and an event that is complete once the copy is."""
    numbers = torch.empty(everyone.shape, dtype=everyone.dtype, device="cpu", pin_memory=True)
    numbers.copy_(everyone, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(everyone.device))
    return numbers, event


def difference_of_weights(weights: np.ndarray, numbers: Sequence[int]) -> str:
    """Returns in words how the weights of two ranks differ; empty if no difference exceeds `WEIGHTS_TOLERANCE`.

    Args:
        weights: the weights of each rank, fp64 [ranks, weights]; NaN for a rank that compares none.
        numbers: the numbers of the ranks among all processes, see `named`.
    """
    ranks = np.flatnonzero(np.isfinite(weights).all(axis=1))
    if len(ranks) < 2:
        return ""
    compared = weights[ranks]
    differs = np.abs(compared - compared[0]) > WEIGHTS_TOLERANCE * np.abs(compared).max()
    if not differs.any():
        return ""
    row, place = np.argwhere(differs)[0]
    return (
        f"has {compared[0, place]:.6g} on {named([ranks[0]], numbers)} where it has {compared[row, place]:.6g} on "
        f"{named([ranks[row]], numbers)}. They were changed, or trained, on some ranks only, for example by a "
        "checkpoint that one rank has loaded, or by LBFGS with a closure that returns each rank's own loss: give all "
        "ranks the same. (Optimizers that try other weights on each rank, such as SAM, may ignore this.)"
    )


def _check(stamps: Sequence[Stamp], differ: str, numbers: Sequence[int]) -> None:
    """Raise ConfigError for stamps that are not all equal, apart from their periods and numbers."""
    first, *others = [stamp._replace(period_us=0, numbers=(), weights=None) for stamp in stamps]
    for rank, other in enumerate(others, start=1):
        if other != first:
            names = {"seed": "seed", "step": "step", "digest": "digest of the configuration and the parameters"}
            mine, theirs = ({name: stamp._asdict()[key] for key, name in names.items()} for stamp in (first, other))
            who = named([0, rank], numbers)
            raise ConfigError(f"{who} do not agree: {describe_difference(mine, theirs)}. {differ}")
