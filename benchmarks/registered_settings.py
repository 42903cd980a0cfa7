"""The settings whose steps `benchmarks.registered` predicts and measures, in sets that never change once registered."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import count

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.training import MODELS, batch_of
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.predict.model import BF16, NATIVE
from workloads.characters import VOCABULARY, CharacterTransformer

#: Characters of a window of the transformer.
LENGTH = 64
#: Samples of each rank in a step: images, or windows of characters.
BATCH = {"mlp": 8, "resnet18": 16, "transformer": 8}


def transformer() -> nn.Module:
    """A transformer of 3.2 M parameters on windows of 64 characters."""
    return CharacterTransformer(LENGTH, layers=4, width=256)


NETWORKS = {**MODELS, "transformer": transformer}


@dataclass(frozen=True)
class Task:
    """A network of one of `NETWORKS`, with a batch that is the same in all steps.

    Attributes:
        network: the network.
        inputs: its inputs.
        targets: a class for each output of the network.
    """

    network: nn.Module
    inputs: Tensor
    targets: Tensor

    @classmethod
    def of(cls, model: str, seed: int) -> Task:
        """Returns the task of a model, whose weights and batch follow from a seed."""
        torch.manual_seed(seed)
        network = NETWORKS[model]()
        batch = BATCH[model]
        if model == "transformer":
            ids = torch.randint(VOCABULARY, (batch, LENGTH + 1))
            return cls(network, ids[:, :-1], ids[:, 1:].flatten())
        return cls(network, *batch_of(model, batch))

    def loss(self, model: nn.Module) -> Tensor:
        """Returns the loss of the network, or of what wraps it."""
        return F.cross_entropy(model(self.inputs).flatten(0, -2), self.targets)


@dataclass(frozen=True)
class Way:
    """How ranks average.

    Attributes:
        bits: of the package's codes; 32 for plain DDP, 16 for torch's bf16 hook, and 0 for ranks that exchange nothing.
        is_hierarchical: whether the ranks of a host average uncompressed before hosts do.
        every: steps from one average of the models to the next; 1 averages gradients in every step.
    """

    bits: int
    is_hierarchical: bool = False
    every: int = 1

    @property
    def name(self) -> str:
        """Name in tables."""
        named = {32: "ddp", 16: "ddp_bf16"}.get(self.bits, f"{self.bits} bit")
        return named + ", hierarchical" * self.is_hierarchical + f", every {self.every} steps" * (self.every > 1)

    def method(self, ranks_per_host: int) -> GQSGDConfig | str:
        """Returns what `predict.model.predict` and `register_gqsgd` are given."""
        if self.bits >= 16:
            return NATIVE if self.bits == 32 else BF16
        config = partial(GQSGDConfig, bits=self.bits, sample_every=0)
        if self.is_hierarchical:
            return config(reducer="hierarchical", node_size=ranks_per_host)
        return config(reducer="two_shot") if ranks_per_host > 1 else config()


@dataclass(frozen=True)
class Hosts:
    """How many hosts there are, and the ranks of each."""

    hosts: int
    ranks_per_host: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.hosts * self.ranks_per_host

    @property
    def name(self) -> str:
        """Name in tables and files."""
        return f"{self.hosts} × {self.ranks_per_host}"


@dataclass(frozen=True)
class Lab:
    """Settings that are measured in turns on the same hosts.

    Attributes:
        of: the hosts.
        rate: of each host's link; see `netlab.units.parse_rate`.
        latency: one way; see `netlab.units.parse_delays`.
        model: a name of `NETWORKS`.
        ways: how ranks average; each is one setting.
        seed: of weights and batches.
    """

    of: Hosts
    rate: str
    latency: str
    model: str
    ways: tuple[Way, ...]
    seed: int


@dataclass(frozen=True)
class Setting:
    """One row: a number from 1 on, the lab, and a way."""

    number: int
    lab: Lab
    way: Way


ALONE = Way(0)
DDP, HALF, EIGHT, FOUR, THREE, TWO = (Way(bits) for bits in (32, 16, 8, 4, 3, 2))
EIGHT_LEVELS, FOUR_LEVELS, TWO_LEVELS = (Way(bits, is_hierarchical=True) for bits in (8, 4, 2))
PAIR, QUAD, TWO_BY_TWO, FOUR_BY_TWO = Hosts(2), Hosts(4), Hosts(2, 2), Hosts(4, 2)

#: The labs of each set. A set that was registered stays as it is; another one gets another number.
SETS: dict[int, tuple[Lab, ...]] = {
    1: (
        Lab(PAIR, "50mbit", "none", "transformer", (DDP, HALF, EIGHT, FOUR), 1),
        Lab(PAIR, "120mbit", "none", "transformer", (EIGHT, FOUR, THREE, TWO), 2),
        Lab(PAIR, "80mbit", "20ms", "transformer", (DDP, EIGHT, FOUR), 3),
        Lab(PAIR, "300mbit", "5ms", "transformer", (DDP, HALF, FOUR, TWO), 4),
        Lab(PAIR, "60mbit", "none", "transformer", (Way(4, every=8), Way(2, every=16)), 5),
        Lab(PAIR, "400mbit", "none", "resnet18", (HALF, EIGHT, FOUR, THREE), 6),
        Lab(PAIR, "1gbit", "none", "resnet18", (DDP, EIGHT, TWO), 7),
        Lab(PAIR, "700mbit", "none", "mlp", (DDP, EIGHT, TWO, Way(4, every=4)), 8),
        Lab(PAIR, "2500mbit", "none", "mlp", (DDP, EIGHT, FOUR), 9),
        Lab(PAIR, "10gbit", "none", "mlp", (DDP, HALF, FOUR), 10),
        Lab(QUAD, "75mbit", "none", "transformer", (HALF, FOUR, TWO), 11),
        Lab(QUAD, "250mbit", "none", "transformer", (DDP, EIGHT, THREE), 12),
        Lab(QUAD, "150mbit", "10ms", "transformer", (DDP, EIGHT, FOUR), 13),
        Lab(QUAD, "600mbit", "none", "resnet18", (DDP, HALF, FOUR), 14),
        Lab(QUAD, "1gbit", "none", "mlp", (EIGHT, FOUR, TWO), 15),
        Lab(QUAD, "10gbit", "none", "mlp", (DDP, FOUR), 16),
        Lab(TWO_BY_TWO, "90mbit", "none", "transformer", (DDP, EIGHT_LEVELS, FOUR_LEVELS, FOUR), 17),
        Lab(TWO_BY_TWO, "1gbit", "none", "mlp", (HALF, EIGHT_LEVELS, FOUR_LEVELS), 18),
        Lab(FOUR_BY_TWO, "200mbit", "none", "transformer", (EIGHT_LEVELS, TWO_LEVELS), 19),
    ),
    2: (
        Lab(PAIR, "65mbit", "none", "transformer", (DDP, HALF, EIGHT, THREE), 21),
        Lab(PAIR, "180mbit", "none", "transformer", (DDP, EIGHT, FOUR, TWO), 22),
        Lab(PAIR, "110mbit", "12ms", "transformer", (HALF, EIGHT, THREE), 23),
        Lab(PAIR, "220mbit", "3ms", "transformer", (DDP, HALF, EIGHT, FOUR), 24),
        Lab(PAIR, "90mbit", "none", "transformer", (Way(8, every=8), Way(4, every=16)), 25),
        Lab(PAIR, "500mbit", "none", "resnet18", (DDP, EIGHT, FOUR, TWO), 26),
        Lab(PAIR, "800mbit", "none", "resnet18", (HALF, FOUR, THREE), 27),
        Lab(PAIR, "900mbit", "none", "mlp", (DDP, HALF, FOUR, Way(2, every=8)), 28),
        Lab(PAIR, "1500mbit", "none", "mlp", (HALF, EIGHT, TWO), 29),
        Lab(PAIR, "10gbit", "none", "mlp", (DDP, EIGHT, THREE), 30),
        Lab(QUAD, "100mbit", "none", "transformer", (DDP, EIGHT, FOUR), 31),
        Lab(QUAD, "180mbit", "none", "transformer", (HALF, FOUR, TWO), 32),
        Lab(QUAD, "120mbit", "6ms", "transformer", (DDP, EIGHT, THREE), 33),
        Lab(QUAD, "400mbit", "none", "resnet18", (HALF, EIGHT, FOUR), 34),
        Lab(QUAD, "700mbit", "none", "mlp", (DDP, EIGHT, FOUR), 35),
        Lab(QUAD, "3gbit", "none", "mlp", (HALF, FOUR), 36),
        Lab(TWO_BY_TWO, "130mbit", "none", "transformer", (DDP, EIGHT_LEVELS, FOUR_LEVELS, EIGHT), 37),
        Lab(TWO_BY_TWO, "600mbit", "none", "mlp", (DDP, HALF, FOUR_LEVELS), 38),
        Lab(FOUR_BY_TWO, "300mbit", "none", "transformer", (EIGHT_LEVELS, FOUR_LEVELS), 39),
    ),
    3: (
        Lab(PAIR, "85mbit", "none", "transformer", (EIGHT, FOUR, THREE), 41),
        Lab(PAIR, "55mbit", "none", "transformer", (HALF, EIGHT, FOUR), 42),
        Lab(PAIR, "140mbit", "25ms", "transformer", (HALF, EIGHT, FOUR), 43),
        Lab(PAIR, "70mbit", "25ms", "transformer", (DDP, HALF, TWO), 44),
        Lab(PAIR, "270mbit", "none", "transformer", (Way(8, every=8), Way(4, every=16)), 45),
        Lab(PAIR, "450mbit", "none", "resnet18", (HALF, FOUR, THREE), 46),
        Lab(PAIR, "900mbit", "none", "resnet18", (DDP, EIGHT, THREE), 47),
        Lab(PAIR, "750mbit", "none", "mlp", (HALF, EIGHT, FOUR), 48),
        Lab(PAIR, "1800mbit", "none", "mlp", (EIGHT, FOUR, THREE, Way(4, every=8)), 49),
        Lab(PAIR, "10gbit", "none", "mlp", (DDP, EIGHT, TWO), 50),
        Lab(PAIR, "1200mbit", "none", "mlp", (DDP, THREE, TWO), 51),
        Lab(QUAD, "105mbit", "none", "transformer", (EIGHT, THREE, TWO), 52),
        Lab(QUAD, "210mbit", "5ms", "transformer", (DDP, FOUR, THREE), 53),
        Lab(QUAD, "40mbit", "none", "transformer", (DDP, EIGHT, FOUR), 54),
        Lab(QUAD, "250mbit", "none", "resnet18", (DDP, EIGHT, FOUR), 55),
        Lab(QUAD, "2gbit", "none", "mlp", (DDP, THREE, TWO), 56),
        Lab(QUAD, "4gbit", "none", "mlp", (EIGHT, THREE, TWO), 57),
        Lab(TWO_BY_TWO, "350mbit", "none", "transformer", (DDP, EIGHT_LEVELS, FOUR_LEVELS, EIGHT), 58),
        Lab(TWO_BY_TWO, "550mbit", "none", "mlp", (DDP, EIGHT_LEVELS, TWO_LEVELS), 59),
        Lab(FOUR_BY_TWO, "160mbit", "none", "transformer", (FOUR_LEVELS, TWO_LEVELS), 60),
    ),
    4: (
        Lab(PAIR, "70mbit", "none", "transformer", (HALF, EIGHT, FOUR, TWO), 61),
        Lab(PAIR, "160mbit", "none", "transformer", (DDP, EIGHT, THREE), 62),
        Lab(PAIR, "95mbit", "15ms", "transformer", (DDP, EIGHT, FOUR), 63),
        Lab(PAIR, "250mbit", "8ms", "transformer", (HALF, FOUR, TWO), 64),
        Lab(PAIR, "130mbit", "none", "transformer", (Way(4, every=8), Way(2, every=16)), 65),
        Lab(PAIR, "350mbit", "none", "resnet18", (DDP, EIGHT, FOUR, THREE), 66),
        Lab(PAIR, "600mbit", "none", "resnet18", (HALF, FOUR, TWO), 67),
        Lab(PAIR, "850mbit", "none", "mlp", (DDP, EIGHT, THREE, Way(8, every=4)), 68),
        Lab(PAIR, "2gbit", "none", "mlp", (HALF, FOUR, TWO), 69),
        Lab(PAIR, "10gbit", "none", "mlp", (DDP, EIGHT, FOUR), 70),
        Lab(QUAD, "60mbit", "none", "transformer", (EIGHT, FOUR, TWO), 71),
        Lab(QUAD, "150mbit", "none", "transformer", (DDP, HALF, THREE), 72),
        Lab(QUAD, "180mbit", "12ms", "transformer", (DDP, EIGHT, FOUR), 73),
        Lab(QUAD, "300mbit", "none", "resnet18", (HALF, EIGHT, TWO), 74),
        Lab(QUAD, "900mbit", "none", "mlp", (DDP, EIGHT, FOUR), 75),
        Lab(QUAD, "10gbit", "none", "mlp", (HALF, THREE, TWO), 76),
        Lab(TWO_BY_TWO, "110mbit", "none", "transformer", (DDP, EIGHT_LEVELS, FOUR_LEVELS, FOUR), 77),
        Lab(TWO_BY_TWO, "800mbit", "none", "mlp", (HALF, EIGHT_LEVELS, TWO_LEVELS), 78),
        Lab(FOUR_BY_TWO, "250mbit", "none", "transformer", (EIGHT_LEVELS, FOUR_LEVELS, TWO_LEVELS), 79),
    ),
}


def settings_of(number: int) -> list[Setting]:
    """Returns the settings of a set, in the order in which they are measured."""
    numbers = count(1)
    return [Setting(next(numbers), lab, way) for lab in SETS[number] for way in lab.ways]
