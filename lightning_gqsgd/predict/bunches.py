"""Bunches: neighbouring pieces of a very large model, which the virtual clock runs as one.

A step of 10¹² parameters has more than 10⁵ pieces, and a prediction would take minutes if each of them were a task of
the clock. A bunch has the work and the messages of its pieces, one after the other. Bunches are short near the start
and the end of a step, where pieces wait for each other, and grow with the distance to them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.kernels.meta import Work
from lightning_gqsgd.predict.profile import Message, Profile, Stage
from lightning_gqsgd.predict.timeline import FINE, MOST, Timeline, bunch_length

#: Pieces in order, equal ones together: each with its number.
Counted = Sequence[tuple[Profile, int]]


def with_counts(pieces: Iterable[Profile], times: int = 1) -> Counted:
    """Returns pieces with their numbers, each piece ``times`` times."""
    return [(profile, times * len(list(equal))) for profile, equal in groupby(pieces)]


def pieces_of(
    timeline: Timeline, of_bucket: Callable[[tuple[Segment, ...]], Sequence[Profile]]
) -> list[tuple[Profile, ...]]:
    """Returns the pieces of each element of `Timeline.bunches`, in bunches if a step has more than `MOST` pieces;
    ``of_bucket`` returns those of a bucket."""
    several = [
        [one for segments, times in bunch.alike for one in with_counts(of_bucket(segments), times)]
        for bunch in timeline.bunches
    ]
    total = sum(count for pieces in several for _, count in pieces)
    if total <= MOST:
        return [tuple(profile for profile, count in pieces for _ in range(count)) for pieces in several]
    made = []
    before = 0
    for pieces in several:
        made.append(bunched(pieces, before, total))
        before += sum(count for _, count in pieces)
    return made


def bunched(pieces: Counted, before: int, total: int, fine: int = FINE) -> tuple[Profile, ...]:
    """Returns pieces in bunches.

    Args:
        pieces: the pieces.
        before: number of pieces before them.
        total: number of all pieces.
        fine: see `timeline.bunch_length`.
    """
    bunches: list[list[tuple[Profile, int]]] = []
    room = 0
    for profile, left in pieces:
        if bunches and _form(profile) != _form(bunches[-1][0][0]):
            room = 0
        while left:
            if not room:
                bunches.append([])
                room = bunch_length(before, total, fine)
            count = min(left, room)
            bunches[-1].append((profile, count))
            room -= count
            left -= count
            before += count
    return tuple(map(_as_one, bunches))


def _form(profile: Profile) -> list[list[tuple[object, ...]]]:
    """Returns what pieces of one bunch have in common: the kinds of their messages."""
    return [[(m.kind, m.scope, m.members) for m in stage.messages] for stage in profile.stages]


def _as_one(pieces: Counted) -> Profile:
    """Returns the profile of a bunch of pieces of the same form."""
    first, count = pieces[0]
    if len(pieces) == 1 and count == 1:
        return first
    stages = []
    for number, stage in enumerate(first.stages):
        works = _sum_of([(profile.stages[number].works, count) for profile, count in pieces])
        sent = [
            sum(count * profile.stages[number].messages[place].sent_bytes for profile, count in pieces)
            for place in range(len(stage.messages))
        ]
        messages = (one._replace(sent_bytes=nbytes) for one, nbytes in zip(stage.messages, sent, strict=True))
        stages.append(Stage(works, tuple[Message, ...](messages)))
    last = _sum_of([(profile.last, count) for profile, count in pieces])
    return Profile(tuple(stages), last, count=sum(count * profile.count for profile, count in pieces))


def _sum_of(several: Sequence[tuple[Sequence[Work], int]]) -> tuple[Work, ...]:
    """Returns the works of some stages, each so many times, with one work for all calls of a kernel."""
    sums: defaultdict[tuple[str, str, int], list[int]] = defaultdict(lambda: [0, 0, 0])
    for works, count in several:
        for work in works:
            total = sums[work.kind, work.codec, work.sources]
            for place, number in enumerate((work.numel, work.nbytes, work.calls)):
                total[place] += count * number
    return tuple(
        Work(kind, codec, numel, sources, nbytes, calls)
        for (kind, codec, sources), (numel, nbytes, calls) in sums.items()
    )
