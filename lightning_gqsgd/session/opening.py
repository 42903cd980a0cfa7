"""The start of everything that reduces: DDP's hook, local steps, FSDP's hooks and `all_reduce`.

Each of them opens a `Meeting`, in which an error of one rank is raised on all ranks. There it checks its arguments,
chooses its reducers for the number of ranks (`nodes.with_nodes`, `config.resolving`), and calls `open_engines`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.wire.agreement import Card, digest_of
from lightning_gqsgd.wire.communicator import check_timeout
from lightning_gqsgd.wire.engine import Engine, Words
from lightning_gqsgd.wire.meeting import Meeting
from lightning_gqsgd.wire.peers import Peers
from lightning_gqsgd.wire.pipeline import STREAMS
from lightning_gqsgd.wire.processors import Place, own_place


class Side(NamedTuple):
    """A process group, and the settings with which its ranks reduce.

    Attributes:
        group: the process group.
        facts: the facts that its ranks must have in common.
        configs: the configurations with the chosen reducers; empty if each call has its own.
        direct: see `Engine`.
    """

    group: dist.ProcessGroup | Peers
    facts: Mapping[str, Any]
    configs: Sequence[GQSGDConfig]
    direct: bool = False


@contextmanager
def open_engines(
    meeting: Meeting,
    sides: Sequence[Side],
    device: torch.device,
    *,
    timeout: timedelta | None = None,
    words: Words,
    dtypes: Sequence[torch.dtype] = (),
    prepare: Callable[[Engine], None] | None = None,
    streams: int = STREAMS,
) -> Iterator[list[Engine]]:
    """Create engines for process groups, on all of their ranks or on none. A collective.

    The caller does its last steps within the context. If one of them raises, the engines are closed again.

    Args:
        meeting: the ranks of all sides.
        sides: the process groups, in the meeting's order. All engines share the runner of the first.
        device: device of the tensors.
        timeout: timeout of collectives; None uses the timeout of each group.
        words: the words for the caller in errors.
        dtypes: dtypes of the tensors; empty if kernels are compiled later, see `Meeting.preparing`.
        prepare: called with the first engine, to create groups and compile kernels that it needs beyond its
            configurations.
        streams: see `Engine`; 1 if there are several sides.

    Yields:
        The engine of each side.

    Raises:
        ConfigError: if ranks differ, or if a rank refuses. It is raised on every rank.
        CollectiveError: if a rank did not arrive in time, or gave no sign of life.
    """
    check_timeout(timeout)
    keys = meeting.agree([side.facts for side in sides], {"place": own_place()})
    places = [Place(*news["place"]) for news in meeting.news_by_rank().values()]
    engines: list[Engine] = []
    with ExitStack() as undo:
        for side, key in zip(sides, keys, strict=True):
            engine = Engine(
                device,
                side.group,
                key,
                timeout=timeout,
                streams=streams,
                shares_runner_of=engines[0] if engines else None,
                words=words,
                direct=side.direct,
                places=places,
            )
            undo.callback(engine.close)
            engines.append(engine)
        # Process groups are created before kernels are compiled: here ranks wait for each other no longer than the
        # timeout.
        for engine, side in zip(engines, sides, strict=True):
            engine.connect(*side.configs)
        if dtypes:
            with meeting.preparing():
                if prepare is not None:
                    prepare(engines[0])
                for engine, side in zip(engines, sides, strict=True):
                    engine.compile(side.configs, dtypes)
        elif any(side.configs for side in sides):
            # There is nothing to prepare yet. If a rank could not connect, it tells the others in this round.
            meeting.agree()
        yield engines
        undo.pop_all()


def prepare_later(
    engine: Engine, group: dist.ProcessGroup | Peers, card: Card, config: GQSGDConfig, dtype: torch.dtype
) -> None:
    """Create the groups and compile the kernels for a new configuration or dtype. A collective.

    If a rank fails after the cards were compared, the engine is closed on all ranks.

    Args:
        engine: the engine of the ranks.
        group: the process group, or the ranks themselves.
        card: a card for the call, which all ranks compare first.
        config: the configuration with the chosen reducer.
        dtype: dtype of the tensors.

    Raises:
        ConfigError: if the ranks' cards differ, or if a rank refuses. It is raised on every rank.
        CollectiveError: if a rank did not arrive in time, or gave no sign of life.
    """
    engine.compare(card).wait()
    try:
        with Meeting(card.purpose, [group], engine.communicator.timeout) as meeting:
            engine.connect(config)
            meeting.agree()
            with meeting.preparing():
                engine.compile([config], [dtype])
    except BaseException:
        # A second attempt under the engine's key would find the addresses of the first one in the store.
        engine.close()
        raise


def facts_of(config: GQSGDConfig, own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts that ranks must have in common before they send anything, plain values by name.

    Args:
        config: the configuration.
        own: more facts from the caller.
    """
    return {**config.to_dict(), **own}


def digest_of_facts(facts: Mapping[str, Any]) -> int:
    """Returns a digest of facts, which ranks compare in each step (see `wire.agreement.Stamp`)."""
    return digest_of(json.dumps(facts, sort_keys=True))
