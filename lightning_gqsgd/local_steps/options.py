"""Options of local steps beside the compression: one frozen value, which checks itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from lightning_gqsgd.errors import ConfigError, check_integer, check_one_of, check_real, plain_integer
from lightning_gqsgd.local_steps.outer import OuterOptimizer, check_outer
from lightning_gqsgd.local_steps.rules import Rule, parse_rule

#: What happens to the state of the inner optimizer when an average is applied.
INNER_STATES = ("keep", "reset", "average")

#: Optimizer steps between two averages: a number, or a function of the number of rounds so far.
Every = int | Callable[[int], int]

#: The most steps that a number can say.
MOST_STEPS = 2**31 - 1

#: DiLoCo's paper starts from 24,000 steps of ordinary training. A character transformer of 0.64 M parameters that
#: started with Nesterov momentum ended 1,024 steps at 2.48 nats; after 128, 256 and 512 steps of plain means, at 2.14,
#: 2.05 and 2.06.
_OUTER_AFTER = 256


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """When changes are averaged, and what is done with their mean.

    Attributes:
        every: optimizer steps between two averages of a parameter, 1 or more; or a function that is given the number of
            rounds so far (0 in the first round) and returns that number. It has to be the same function on all ranks.
        outer: what moves the anchor by the mean change: ``"nesterov"``, which is SGD with learning rate 0.7 and
            Nesterov momentum 0.9 (DiLoCo, arXiv 2311.08105); ``"sgd"``, which is SGD with learning rate 1 (FedPAQ,
            arXiv 1909.13014); ``"heavy_ball"``, the same with momentum 0.4; or a class or function that makes a torch
            optimizer of a list of tensors.
        outer_after: optimizer steps at the start of training whose averages leave ``outer`` out, 0 or more: the anchor
            becomes the mean of the ranks' models. None: 256 with ``outer="nesterov"``, whose momentum would carry the
            large changes of the first steps to where a network learns much less, and otherwise 0.
        fragments: number of parts of about equal size whose averages start at different steps of a round, 1 or more.
        delay: number of steps between the start of an average and its use, 0 or more, and less than ``every``.
        mixing: weight α of a rank's own parameters when a delayed average is used, 0 to 1: x ← α x + (1 − α) anchor
            (Streaming DiLoCo, arXiv 2501.18512). Without a delay it does not count.
        inner_state: the inner optimizer's state of a parameter when its average is used: ``"keep"``, ``"reset"`` or
            ``"average"`` over all ranks, uncompressed.
        rule: how the changes of all ranks become one mean change: ``"mean"``, one message of each rank; or another name
            of `rules.RULES`, a rule with numbers of your own, or a mapping of its numbers with its name as ``"name"``.
        anchor_device: device of the anchor and of the outer optimizer's state, e.g. ``"cpu"``; None: the parameters'.
        anchor_dtype: dtype of both, e.g. ``torch.bfloat16``; None: fp64 for fp64 parameters, and otherwise fp32.

    Raises:
        ConfigError: a value out of its range, or two that do not go together.
    """

    every: Every = 32
    outer: OuterOptimizer = "nesterov"
    outer_after: int | None = None
    fragments: int = 1
    delay: int = 0
    mixing: float = 0.5
    inner_state: str = "keep"
    rule: Rule | str | Mapping[str, Any] = "mean"
    anchor_device: torch.device | str | None = None
    anchor_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("every", "outer_after", "fragments", "delay"):
            object.__setattr__(self, name, plain_integer(getattr(self, name)))
        if not callable(self.every):
            check_integer("every", self.every, 1, MOST_STEPS)
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
        if self.anchor_dtype is not None and not (
            isinstance(self.anchor_dtype, torch.dtype) and self.anchor_dtype.is_floating_point
        ):
            raise ConfigError(f"anchor_dtype={self.anchor_dtype!r} is no floating-point dtype, e.g. torch.bfloat16")
        self.steps_of_round(0)

    @property
    def averaging(self) -> Rule:
        """The rule of averages."""
        return parse_rule(self.rule)

    def steps_of_round(self, number: int) -> int:
        """Optimizer steps of a round; ``number`` counts the rounds from 0.

        Raises:
            ConfigError: ``every`` gives no number of steps, or one that is not above ``delay``.
        """
        steps = plain_integer(self.every(number)) if callable(self.every) else self.every
        if callable(self.every):
            check_integer(f"every({number})", steps, 1, MOST_STEPS)
        if self.delay >= steps:
            raise ConfigError(
                f"delay={self.delay} must be less than every={steps} (local_steps of a strategy): an average is used "
                f"before the next one of the same parameters starts; take delay={steps - 1} or less"
            )
        return steps

    def leaves_outer_out(self, step: int) -> bool:
        """Whether the average that starts after an optimizer step is used without the outer optimizer."""
        return self.outer_after is not None and step <= self.outer_after

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Names of all fields, in order."""
        return tuple(field.name for field in fields(cls))
