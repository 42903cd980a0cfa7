"""What a run is called in dashboards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Labels:
    """The name of a run, and what dashboards find it by.

    Attributes:
        name: name of this run.
        group: what the run belongs to: a comparison, or all runs with its title.
        experiment, strategy: names from the configuration.
        hardware: name of the hardware profile, if there is one.
    """

    name: str
    group: str
    experiment: str
    strategy: str
    hardware: str | None = None

    @property
    def tags(self) -> list[str]:
        """Experiment, strategy and hardware profile."""
        return [self.experiment, self.strategy, *([self.hardware] if self.hardware else [])]
