"""The options of local steps apart from the compression, as one frozen value that is checked when it is created."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

import torch

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import (
    ConfigError,
    check_integer,
    check_one_of,
    check_real,
    counted,
    first_line,
    plain_integer,
)
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES
from lightning_gqsgd.local_steps.outer import OuterOptimizer, check_outer
from lightning_gqsgd.local_steps.rules import Rule, parse_rule
from lightning_gqsgd.spec.fields import FieldArguments
from lightning_gqsgd.spec.quantities import TIMES, quantity

#: What happens to the state of the inner optimizer when an average is applied.
INNER_STATES = ("keep", "reset", "average")

#: The interval between two averages: a number of optimizer steps, a function of the number of rounds so far, or a time.
Every = int | Callable[[int], int] | str | timedelta

#: The largest number of steps.
MOST_STEPS = 2**31 - 1

#: The longest time between two averages.
_LONGEST = timedelta(days=7)

#: DiLoCo's paper starts from 24,000 steps of ordinary training. A character transformer of 0.64 M parameters that
#: started with Nesterov momentum ended 1,024 steps at 2.48 nats; after 128, 256 and 512 steps of plain means, at 2.14,
#: 2.05 and 2.06.
_OUTER_AFTER = 256

#: DiLoCo with a delay gives half of the weight to the rank's own model (arXiv 2501.18512).
_MIXING = 0.5

#: A change is left out of a merge if its norm is more than this times the median over all members, also per step.
_OUTLIER = 10.0


class LocalArguments(FieldArguments, total=False):
    """Keyword arguments of `LocalSteps` other than its named ones: fields of `LocalOptions` and of a configuration."""

    outer_after: int
    mixing: float
    inner_state: str
    rule: Rule | str | Mapping[str, Any]
    anchor_device: torch.device | str
    anchor_dtype: torch.dtype
    min_replicas: int
    outlier: float


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """Options of local steps: when changes are averaged, and how their mean is used.

    Attributes:
        every: number of optimizer steps between two averages of a parameter, 1 or more. Or a function that takes the
            number of rounds so far (0 in the first round) and returns the number of steps; it has to be the same
            function on all ranks. Or a time, e.g. ``"20s"``, ``"2min"`` or a timedelta: each rank makes as many steps
            as it can in this time, and changes are weighted by the number of samples that each rank has seen (see
            `merges`).
        outer: the outer optimizer, which moves the anchor by the mean change: ``"nesterov"``, which is SGD with
            learning rate 0.7 and Nesterov momentum 0.9 (DiLoCo, arXiv 2311.08105); ``"sgd"``, which is SGD with
            learning rate 1 (FedPAQ, arXiv 1909.13014); ``"heavy_ball"``, the same with momentum 0.4; or a class or
            function that takes a list of tensors and returns a torch optimizer.
        outer_after: number of optimizer steps at the start of training whose averages do not use ``outer``, 0 or more:
            the anchor then becomes the mean of the ranks' models. None means 256 with ``outer="nesterov"``, and
            otherwise 0. With Nesterov momentum from the start, the large changes of the first steps move a network to a
            point where it learns much less.
        fragments: number of parts of about equal size whose averages start at different steps of a round, 1 or more.
        delay: number of steps between the start of an average and its use, 0 or more, and less than ``every``. If
            ``every`` is a time, and with ``elastic``, 1 or more lets training continue during the merge; its result is
            used after the first step that ends later than the merge.
        mixing: weight α of a rank's own parameters when a delayed average is used, 0 to 1: x ← α x + (1 − α) anchor
            (Streaming DiLoCo, arXiv 2501.18512). Without a delay, it has no effect.
        inner_state: what happens to the inner optimizer's state of a parameter when its average is used: ``"keep"`` it,
            ``"reset"`` it, or ``"average"`` it over all ranks, uncompressed. `torch.optim.LBFGS` needs ``"reset"``.
        rule: the rule by which the changes of all ranks become one mean change: ``"mean"``, with one message of each
            rank; or another name of `rules.RULES`; or a rule object; or a mapping with the rule's name as ``"name"``
            and its numbers.
        anchor_device: device of the anchor and of the outer optimizer's state, e.g. ``"cpu"``. None: the device of the
            parameters.
        anchor_dtype: dtype of both, e.g. ``torch.bfloat16``. None: fp64 for fp64 parameters, and otherwise fp32. The
            anchors of buffers have at least fp32, so that constants are not rounded.
        elastic: whether ranks may leave and join while training runs. They meet at torchft's lighthouse, whose address
            is in the environment variable TORCHFT_LIGHTHOUSE, and not in a process group of torch.distributed.
        min_replicas: with ``elastic``, the least number of ranks for a merge, 1 or more.
        outlier: used if ``every`` is a time, and with ``elastic``. A change is left out of a merge if its norm is more
            than ``outlier`` times the median over all ranks, as a whole, per step, and in relation to the learning rate
            (see `merges.rows`); 1 or more. Buffers do not count. With ``math.inf``, no change is left out for its size.
            A change that is not finite is always left out.

    Raises:
        ConfigError: if a value is out of its range, or if two values cannot be combined.
    """

    every: Every = 32
    outer: OuterOptimizer = "nesterov"
    outer_after: int | None = None
    fragments: int = 1
    delay: int = 0
    mixing: float = _MIXING
    inner_state: str = "keep"
    rule: Rule | str | Mapping[str, Any] = "mean"
    anchor_device: torch.device | str | None = None
    anchor_dtype: torch.dtype | None = None
    elastic: bool = False
    min_replicas: int = 1
    outlier: float = _OUTLIER

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", checked_every("every", self.every))
        for name in ("outer_after", "fragments", "delay", "min_replicas"):
            object.__setattr__(self, name, plain_integer(getattr(self, name)))
        check_outer(self.outer)
        if self.outer_after is None:
            object.__setattr__(self, "outer_after", _OUTER_AFTER if self.outer == "nesterov" else 0)
        check_integer("outer_after", self.outer_after, 0, MOST_STEPS)
        check_integer("fragments", self.fragments, 1, MOST_STEPS)
        check_integer("delay", self.delay, 0, MOST_STEPS)
        check_real("mixing", self.mixing, 0, 1)
        check_one_of("inner_state", self.inner_state, INNER_STATES)
        object.__setattr__(self, "rule", parse_rule(self.rule))
        if self.delay and self.averaging.most_requests > 1:
            raise ConfigError(
                f"rule={self.rule} sends {self.averaging.most_requests} messages one after the other, and steps wait "
                f"for all but the first, so delay={self.delay} hides nothing; take delay=0"
            )
        if self.inner_state == "average" and self.delay:
            raise ConfigError(
                f"inner_state='average' with delay={self.delay} would undo what the inner optimizer has learnt since; "
                "take delay=0, or inner_state='keep'"
            )
        if self.anchor_dtype is not None and self.anchor_dtype not in COMPUTE_DTYPES:
            raise ConfigError(f"anchor_dtype={self.anchor_dtype!r} is not one of {', '.join(map(str, COMPUTE_DTYPES))}")
        _check_device(self.anchor_device)
        if not isinstance(self.elastic, bool):
            raise ConfigError(f"elastic={self.elastic!r} must be True or False")
        check_integer("min_replicas", self.min_replicas, 1, MOST_STEPS)
        check_real("outlier", self.outlier, 1, math.inf)
        if self.min_replicas > 1 and not self.elastic:
            raise ConfigError(f"min_replicas={self.min_replicas} is for elastic=True; give both, or leave it out")
        if self.is_merged:
            self._check_merges()
        elif self.outlier != _OUTLIER:
            raise ConfigError(
                f"outlier={self.outlier} is for rounds by the clock (every='20s') and for elastic=True; with every="
                f"{self.every!r}, no change is left out for its size: leave outlier out"
            )
        if self.every_s is None:
            self.steps_of_round(0)

    @property
    def every_s(self) -> float | None:
        """Seconds of a round; None if rounds have a number of steps."""
        return self.every.total_seconds() if isinstance(self.every, timedelta) else None

    @property
    def is_merged(self) -> bool:
        """Whether changes are merged with weights (see `merges`), and not averaged after equal numbers of steps."""
        return self.elastic or self.every_s is not None

    def _check_merges(self) -> None:
        """Raise ConfigError for options that only work for averages after equally many steps."""
        asked = "elastic=True" if self.elastic else f"every={self.every_s:g} s"
        if self.fragments > 1:
            raise ConfigError(
                f"fragments={self.fragments}: with {asked}, a merge has the whole model; leave fragments out, and give "
                "delay=1 so that no step waits for it"
            )
        if self.inner_state == "average":
            raise ConfigError(
                f"inner_state='average': with {asked}, ranks make different numbers of steps, and their optimizers' "
                "states have different ages; take 'keep' or 'reset'"
            )
        if self.mixing != _MIXING:
            raise ConfigError(
                f"mixing={self.mixing}: with {asked}, a rank adds what the others have learnt to its own model, and "
                "mixes nothing; leave mixing out"
            )
        if self.averaging != parse_rule("mean"):
            raise ConfigError(f"rule={self.rule}: with {asked}, the rule is the mean weighted by samples; leave it out")

    def check_compression(self, config: GQSGDConfig) -> None:
        """Raise ConfigError for a compression, with the chosen reducer, that does not work with these options."""
        self.averaging.check(config)
        if not self.is_merged:
            return
        if config.remembers:
            raise ConfigError(
                "a merge by the clock, or with members that come and go, remembers nothing of the errors of earlier "
                f"ones; give {config.without_memory}, or a number of steps for every, without elastic"
            )
        if config.warmup_steps:
            raise ConfigError(f"warmup_steps={config.warmup_steps}: merges by the clock count no steps; leave it out")

    @property
    def averaging(self) -> Rule:
        """The rule of averages."""
        return parse_rule(self.rule)

    def steps_of_round(self, number: int) -> int:
        """Returns the number of optimizer steps of a round; ``number`` is the number of the round, from 0.

        Raises:
            ConfigError: if ``every`` gives no number of steps, or one that is not larger than ``delay``.
        """
        assert not isinstance(self.every, str | timedelta)  # those have `every_s`
        steps = plain_integer(self.every(number)) if callable(self.every) else self.every
        if callable(self.every):
            check_integer(f"every({number})", steps, 1, MOST_STEPS)
        if self.delay >= steps:
            raise ConfigError(
                f"delay={self.delay} must be less than every={steps} (local_steps of a strategy): an average is used "
                f"before the next one of the same parameters starts; take "
                + (f"delay={steps - 1} or less" if steps > 1 else "delay=0")
            )
        return steps

    def leaves_outer_out(self, step: int) -> bool:
        """Returns whether the average that starts after an optimizer step is used without the outer optimizer."""
        return self.outer_after is not None and step <= self.outer_after

    def every_in_words(self) -> str:
        """Returns the time or the number of steps of a round: ``20 s``, ``32 steps`` or ``8, 16, 32, ... steps``."""
        if self.every_s is not None:
            return f"{self.every_s:g} s"
        if callable(self.every):
            return "".join(f"{self.steps_of_round(number)}, " for number in range(3)) + "... steps"
        return counted(self.steps_of_round(0), "step")

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Names of all fields, in order."""
        return tuple(field.name for field in fields(cls))


def checked_every(name: str, value: Any) -> Every:
    """Returns the interval between two averages that a user has written, with a time as a timedelta.

    Args:
        name: name of the option, for errors: ``every``, or ``local_steps`` in a strategy.
        value: the value that the user has written.

    Raises:
        ConfigError: if the value is no number of steps from 1 on, no function, and no time.
    """
    if isinstance(value, str | timedelta):
        return parse_time(name, value, f"; a number of steps is an integer, e.g. {name}=32")
    if callable(value):
        return value
    steps = plain_integer(value)
    check_integer(name, steps, 1, MOST_STEPS)
    return steps


def parse_time(name: str, value: str | timedelta, otherwise: str = "") -> timedelta:
    """Returns a time that a user has written, such as ``"20s"``.

    Args:
        name: name of the option, for errors.
        value: the value that the user has written.
        otherwise: end of the message, which says what the option may be other than a time.

    Raises:
        ConfigError: if the value is no time, or is below a microsecond or above seven days.
    """
    seconds = value.total_seconds() if isinstance(value, timedelta) else quantity(value, TIMES)
    if seconds is None:
        raise ConfigError(
            f"{name}={value!r} is not a time: write a number and a unit of {', '.join(TIMES)}, e.g. {name}='20s'"
            f"{otherwise}"
        )
    if not 1e-6 <= seconds <= _LONGEST.total_seconds():
        raise ConfigError(f"{name}={value!r} is out of range: 1us to {_LONGEST.days} days")
    return timedelta(seconds=seconds)


def _check_device(device: torch.device | str | None) -> None:
    """Raise ConfigError for an anchor_device that is no device, or has no memory. The start checks whether it
    exists."""
    remedy = "give 'cpu', or the device of a GPU, or leave it out"
    if device is None:
        return
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"anchor_device={device!r} is not a device ({first_line(error)}); {remedy}") from None
    if kind == "meta":
        raise ConfigError(f"anchor_device={device!r} has no memory; {remedy}")
