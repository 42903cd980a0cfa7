"""`Fields`: the fields of a configuration, as a record whose values are not checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict, TypeVar

from lightning_gqsgd.spec.bits_by_name import BitsByName
from lightning_gqsgd.spec.decisions import ALLOW, Decision
from lightning_gqsgd.spec.memories import Memory, named

#: The default of the field ``sparse_limit``. A gather sends each rank's touched rows to all ranks, and a dense
#: reduction sends each coordinate about twice. In a gather, a short row also has its own scale and its row number,
#: which take about as many bytes as its codes.
SPARSE_LIMIT = 1.0


class Chosen(str):
    """The name of a codec that was chosen for "auto".

    It compares equal to the plain name. If fields of a configuration are replaced, a codec of this type is chosen
    again, because e.g. two bits need another codec than eight. A name that a user has given is kept.
    """

    __slots__ = ()


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The plain fields of a configuration. `config.GQSGDConfig` describes them, and checks that they can work.

    The functions that check and resolve fields take this record, so that they do not depend on `GQSGDConfig`, which
    inherits from it.
    """

    bits: int | Literal["auto"] | Mapping[str, int] | None = None
    codec: str = "auto"
    levels: int | None = None
    mantissa: int = 0
    density: float = 0.01
    block_size: int = 0
    norm: str = "max"
    clip: float = 0.0
    scale: str = "auto"
    norm_over_ranks: str = "max"
    scale_per: str = "block"
    dither: str = "adaptive"
    rotation: bool = False
    coder: str = "fixed"
    reducer: str = "auto"
    node_size: int = 0
    memory: str | Memory = "auto"
    memory_down: str | Memory = "auto"
    min_numel: int = 1024
    exclude: tuple[str, ...] = ()
    warmup_steps: int = 0
    seed: int = 0
    sample_every: int = 100
    auto: bool | Decision | Mapping[str, Any] = False
    allow: tuple[int, ...] = ALLOW
    max_slowdown: float | None = None
    sparse: str = "refuse"
    sparse_limit: float = SPARSE_LIMIT
    connections: int = 1

    @property
    def chooses_bits(self) -> bool:
        """True if the number of bits is chosen during training, from the length of steps or the noise of gradients."""
        return bool(self.auto) or self.max_slowdown is not None

    @property
    def bits_by_name(self) -> BitsByName | None:
        """``bits`` by patterns of parameter names, or None if all parameters have the same bits."""
        return self.bits if isinstance(self.bits, BitsByName) else None

    @property
    def num_bits(self) -> int:
        """``bits`` as an integer. In a configuration that is built, it is one, unless bits are given by name."""
        assert isinstance(self.bits, int)
        return self.bits

    @property
    def up(self) -> Memory | None:
        """The memory for the messages that a rank sends, or None."""
        return named(self.memory)

    @property
    def down(self) -> Memory | None:
        """The memory for the messages that the owner of a shard sends back, or None."""
        return named(self.memory_down)

    @property
    def remembers(self) -> bool:
        """True if there is a memory in at least one direction."""
        return self.up is not None or self.down is not None

    @property
    def without_memory(self) -> str:
        """The arguments that switch off the memories that there are, for errors: ``memory='none'``."""
        memories = {"memory": self.up, "memory_down": self.down}
        return " and ".join(f"{name}='none'" for name, memory in memories.items() if memory is not None)

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Returns the names of all fields, in order."""
        return tuple(field.name for field in fields(cls))


class FieldArguments(TypedDict, total=False):
    """The fields as optional keyword arguments, with the types that command lines and files can give.

    Editors and type checkers read this class (``**fields: Unpack[FieldArguments]``), and signatures are built from it
    at run time.
    """

    bits: int | Literal["auto"] | dict[str, int]
    codec: str
    levels: int
    mantissa: int
    density: float
    block_size: int
    norm: str
    clip: float
    scale: str
    norm_over_ranks: str
    scale_per: str
    dither: str
    rotation: bool
    coder: str
    reducer: str
    node_size: int
    # The dictionary comes first, because jsonargparse takes the first type that fits, and a Memory needs all three
    # numbers.
    memory: str | dict[str, float | None] | Memory
    memory_down: str | dict[str, float | None] | Memory
    min_numel: int
    exclude: Sequence[str]
    warmup_steps: int
    seed: int
    sample_every: int
    auto: bool | dict[str, Any] | Decision
    allow: Sequence[int]
    max_slowdown: float
    sparse: str
    sparse_limit: float
    connections: int


#: A `Fields` record, or a subclass that checks its fields.
AnyFields = TypeVar("AnyFields", bound=Fields)
