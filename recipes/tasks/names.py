"""Names that settings of the optimizer take. Nothing heavy is imported: names are checked before torch is."""

from __future__ import annotations

OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("onecycle", "cosine", "step")
