"""The reducer `sum`: all ranks share scales, so an integer all-reduce adds codes (Global-QSGD, arXiv 2305.18627).

The scales are exchanged by a MAX, or another norm over ranks. The codes are added by a SUM of lanes that are wide
enough for all ranks: K levels per rank with n (K-1) < 2^bits. Nothing is scaled after rounding, so no sum can overflow.
`summed` has the part that this reducer shares with `tree`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.codecs import Codec
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.layout import Layout, place
from lightning_gqsgd.reducers.base import Exchange, StepKeys, ring_bytes
from lightning_gqsgd.reducers.summed import Summed


class Sum(Summed):
    """Reduces with an integer all-reduce of codes under shared scales."""

    memories: ClassVar[tuple[str, ...]] = ("memory",)

    @staticmethod
    def check(codec: Codec) -> None:
        if not codec.adds_as_integers:
            others = "'tree' or 'two_shot'" if codec.adds_in_pairs else "'two_shot' or 'gather'"
            raise ConfigError(
                f"reducer='sum' cannot add codes of codec={codec.name!r}; take codec='linear', or reducer={others}"
            )
        codec.check_room_for_sums()

    @staticmethod
    def mean_error(codec: Codec, ranks: int) -> float:
        # Each rank rounds once, to fewer levels, and the roundings average out.
        return codec.error_variance(ranks) / ranks

    def _placed(self, table: np.ndarray) -> Layout:
        return place(table, self.link.quantiser, shards=1, scale_bytes=0, raw_bytes=0)

    def _sent_bytes(self) -> int:
        return ring_bytes(self.layout.message_bytes, self.ranks)

    def _added(
        self, codes: Tensor, layout: Layout, rank: int, keys: StepKeys
    ) -> Generator[Sequence[Exchange], None, None]:
        lane = torch.uint8 if 8 % self.link.quantiser.bits == 0 else torch.int64
        yield (Exchange.in_place("sum", codes.view(lane)),)
