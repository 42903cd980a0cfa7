"""How long the tests of reliability are, and which random numbers they draw.

Environment variables:

* ``GQSGD_RELIABILITY_SEED``: the seed of all drivers; 0 if it is not set.
* ``GQSGD_RELIABILITY_SCALE``: a factor for the number of cases, draws and events; 1 if it is not set.
* ``GQSGD_SOAK_STEPS``: steps of the soak test; 1,000 if it is not set.
* ``GQSGD_CHAOS_SECONDS``: seconds in which the chaos driver starts new events; 120 if it is not set.
* ``GQSGD_EVENTS``: events among members that come and go; 30 if it is not set.
* ``GQSGD_SCHEDULES``: schedules of virtual members; 2,000 if it is not set.
"""

from __future__ import annotations

import os
import random

#: The seed of all drivers.
SEED = int(os.environ.get("GQSGD_RELIABILITY_SEED", "0"))
#: A factor for the number of cases, draws and events.
SCALE = float(os.environ.get("GQSGD_RELIABILITY_SCALE", "1"))
#: Steps of the soak test.
SOAK_STEPS = int(os.environ.get("GQSGD_SOAK_STEPS", "1000"))
#: Seconds in which the chaos driver starts new events.
CHAOS_SECONDS = float(os.environ.get("GQSGD_CHAOS_SECONDS", "120"))
#: Events among members that come and go.
EVENTS = int(os.environ.get("GQSGD_EVENTS", "30"))
#: Schedules of virtual members.
SCHEDULES = int(os.environ.get("GQSGD_SCHEDULES", "2000"))


def scaled(count: int) -> int:
    """A number of cases, times `SCALE`; at least 1."""
    return max(1, round(count * SCALE))


def chance(*names: object) -> random.Random:
    """The random numbers of a driver, which depend on `SEED` and on the driver's names."""
    return random.Random(f"{SEED} {names}")  # noqa: S311 - no secrets
