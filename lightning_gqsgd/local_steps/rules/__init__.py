"""Rules of averages: how the ranks' changes become one mean change. A new rule is a file, and a line in `RULES`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_gqsgd.errors import ConfigError, check_one_of
from lightning_gqsgd.local_steps.rules.base import (
    Averager,
    Exchanges,
    Mean,
    MeanOf,
    PendingMean,
    Rule,
    RuleRequest,
    RuleRequests,
)
from lightning_gqsgd.local_steps.rules.censored import Censored
from lightning_gqsgd.local_steps.rules.multi_step import MultiStep
from lightning_gqsgd.local_steps.rules.predicted import Predicted

__all__ = [
    "RULES",
    "Averager",
    "Exchanges",
    "MeanOf",
    "PendingMean",
    "Rule",
    "RuleRequest",
    "RuleRequests",
    "parse_rule",
]

RULES: dict[str, type[Rule]] = {
    "mean": Mean,
    "censored": Censored,
    "multi_step": MultiStep,
    "predicted": Predicted,
}


def parse_rule(value: object) -> Rule:
    """Returns the rule for a value: a rule, its name, or a mapping of its numbers with its name as ``"name"``.

    Raises:
        ConfigError: if the value describes no rule.
    """
    if isinstance(value, Rule):
        return value
    numbers: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {"name": value}
    name = numbers.pop("name", None)
    check_one_of("rule", name, RULES)
    try:
        return RULES[str(name)](**numbers)
    except TypeError as error:
        raise ConfigError(f"rule={value!r}: {error}; give the fields of {RULES[str(name)].__name__}") from None
