"""What may be wrong with the state of a hook in a checkpoint, or foreign to the run that loads it."""

from __future__ import annotations

from typing import Any

import torch

#: Changes that no hook takes.
REFUSED = ("truncated", "schema", "schema as text")
#: Changes that a hook with a memory does not take.
REFUSED_WITH_MEMORY = ("integer memory", "other sizes", "another rank's")
#: Changes that a hook with a memory takes, and starts with an empty memory.
EMPTYING = ("more ranks", "fewer ranks", "other kinds", "no memory")
#: Changes that ranks have to be told of where only one of them has loaded them, unless nothing of a step is compared.
OF_STEPS = ("seed", "step")
#: Changes that a hook with a memory has to be told of where only one of them has loaded them.
OF_MEMORY = (*EMPTYING, "double memory")
CHANGES = (*REFUSED, *REFUSED_WITH_MEMORY, *OF_STEPS, *OF_MEMORY, "other version")


def change_state(state: dict[str, Any], change: str) -> None:
    """Change a hook's state in place. What is a change of its memory does nothing to a state without one."""
    if change == "truncated":
        del state["seed"]
    elif change == "schema":
        state["schema"] = 99
    elif change == "schema as text":
        state["schema"] = str(state["schema"])
    elif change in OF_STEPS:
        state[change] += 5
    elif change == "other version":  # which has a field that this one lacks, and lacks one that this one has
        state["config"]["field_of_tomorrow"] = 1
        del state["config"]["block_size"]
    elif change and state.get("memory"):
        state["memory"] = _changed_memory(state["memory"], change)


def _changed_memory(memory: dict[str, dict[int, torch.Tensor]], change: str) -> Any:
    if change in ("another rank's", "no memory"):
        return None if change == "another rank's" else {}
    if change == "other kinds":
        return {f"{kind} of tomorrow": tensors for kind, tensors in memory.items()}
    of_rows = {
        "more ranks": lambda rows: torch.cat([rows, rows[:1]]),
        "fewer ranks": lambda rows: rows[:1],
        "double memory": lambda rows: rows.double(),
        "integer memory": lambda rows: rows.int(),
        "other sizes": lambda rows: rows[:, :-1].contiguous(),
    }[change]
    return {kind: {number: of_rows(rows) for number, rows in tensors.items()} for kind, tensors in memory.items()}
