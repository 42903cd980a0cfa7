"""Random mutations of plain values, as they may come from a file or a peer."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

#: Values that replace others.
LEAVES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**70,
    1.5,
    -0.5,
    float("inf"),
    float("nan"),
    "",
    "x",
    "float32",
    "nn",
]
LEAVES += [[], [1], {}, {"a": 1}, {3: 4}, [[0.0, [[0, 1, False]]]], "__class__"]


def mutated(chance: random.Random, value: Any, leaves: list[Any] = LEAVES) -> Any:
    """A copy of a value with one to four mutations: an entry is replaced, deleted or added."""
    if chance.random() < 0.02:
        return copy.deepcopy(chance.choice(leaves))
    value = copy.deepcopy(value)
    for _ in range(chance.choice([1, 1, 2, 4])):
        places = [(parent, key) for parent, key in _places(value)]
        if not places:
            break
        parent, key = chance.choice(places)
        kind = chance.randrange(3)
        if kind == 0:
            parent[key] = copy.deepcopy(chance.choice(leaves))
        elif kind == 1:
            del parent[key]
        elif isinstance(parent, dict):
            parent[chance.choice(["new", 3, "version"])] = copy.deepcopy(chance.choice(leaves))
        else:
            parent.append(copy.deepcopy(chance.choice(leaves)))
    return value


def mutated_bytes(chance: random.Random, data: bytes) -> bytes:
    """Bytes of which some are replaced, deleted or inserted."""
    changed = bytearray(data)
    for _ in range(chance.randrange(1, 5)):
        kind, at = chance.randrange(4), chance.randrange(len(changed) + 1)
        if kind == 0 and at < len(changed):
            changed[at] = chance.randrange(256)
        elif kind == 1:
            del changed[at : at + chance.randrange(20)]
        elif kind == 2:
            changed[at:at] = chance.randbytes(3)
        else:
            del changed[at:]
    return bytes(changed)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """All containers within a value, with each of their keys."""
    if not isinstance(value, (dict, list)):
        return
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        yield from _places(value[key])
