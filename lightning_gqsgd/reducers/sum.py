"""Global-QSGD (arXiv 2305.18627): block scales shared by all ranks, so that an integer allreduce adds the codes.

The largest magnitudes go through a MAX, the codes through a SUM of lanes wide enough for all ranks: K levels per rank
with n (K-1) < 2^bits. Nothing is scaled after rounding, so no sum can overflow. Parameters that travel uncompressed
take the two-shot way beside it, which adds in rank order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.codecs import Codec
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels import kernels_for
from lightning_gqsgd.kernels.layout import RAW, place
from lightning_gqsgd.reducers.base import (
    Exchange,
    Reducer,
    Setting,
    StepKeys,
    Steps,
    ring_bytes,
    side_by_side,
    uncompressed,
)
from lightning_gqsgd.reducers.link import Link
from lightning_gqsgd.reducers.memory import UP, MemoryStore
from lightning_gqsgd.reducers.two_shot import TwoShot

if TYPE_CHECKING:
    from lightning_gqsgd.spec.fields import Fields


class Sum(Reducer):
    """Reduces with an integer all-reduce of codes under shared scales.

    See `reducers.base.Reducer` for the arguments.
    """

    scales: ClassVar[tuple[str, ...]] = ("global",)
    memories: ClassVar[tuple[str, ...]] = ("memory",)
    adds_codes: ClassVar[bool] = True

    def __init__(self, table: np.ndarray, setting: Setting) -> None:
        ranks = setting.ranks
        q = setting.codec.quantiser(setting.block_size, summed=ranks)
        self.link = Link(setting, q, UP, scales_travel=False)
        self.needs_copy = self.link.needs_copy
        # Uncompressed coordinates cannot be added as integers, so they are a part of their own.
        raw = table[:, RAW] == 1
        self.layout = place(table[~raw], q, shards=1, scale_bytes=0, raw_bytes=0)
        self.raw = TwoShot(table[raw], uncompressed(setting))
        self.lane = torch.uint8 if 8 % q.bits == 0 else torch.int64
        # Maxima travel in the compute dtype: 8 bytes for fp64 gradients, 4 for all others.
        maxima_bytes = len(self.layout.table) * (8 if setting.dtype == torch.float64 else 4)
        self.message_bytes = self.layout.message_bytes + maxima_bytes + self.raw.message_bytes
        self.sent_bytes = ring_bytes(self.layout.message_bytes + maxima_bytes, ranks) + self.raw.sent_bytes

    @staticmethod
    def check(codec: Codec) -> None:
        """Raise ConfigError for a codec whose codes the reducer cannot work with; see `reducers.base.Reducer.check`.
        Codes have to be numbers of equidistant levels."""
        if not codec.adds_as_integers:
            others = "'tree' or 'two_shot'" if codec.adds_in_pairs else "'two_shot' or 'gather'"
            raise ConfigError(
                f"reducer='sum' cannot add codes of codec={codec.name!r}; take codec='linear', or reducer={others}"
            )
        if not codec.leaves_room_for_sums:
            raise ConfigError(
                f"bits={codec.bits} leaves no room to sum the codes of two ranks; take bits=2 or reducer='two_shot'"
            )

    @staticmethod
    def stages(config: Fields, ranks: int) -> int:
        """Returns the number of stages; see `reducers.base.Reducer.stages`."""
        return 2

    @staticmethod
    def mean_error(codec: Codec, ranks: int) -> float:
        """Returns the predicted mean square error; see `reducers.base.Reducer.mean_error`. Each rank
        rounds once, to fewer levels, and the roundings average out."""
        return codec.error_variance(ranks) / ranks

    def steps(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
        """Replace ``x`` by the mean over ranks; see `reducers.base.Reducer.steps`."""
        return (yield from side_by_side(self.raw.steps(x, rank, keys, store), self._coded(x, rank, keys, store)))

    def _coded(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
        kernels = kernels_for(x.device)
        layout = self.layout.on(x.device)
        q = self.link.quantiser
        outgoing = self.link.outgoing(x, layout.whole, keys.rotation, store)
        maxima = outgoing.find_scales()
        # Codes can be added only under equal scales, so the maxima have to be there before anything is encoded.
        yield (Exchange.in_place("max", maxima),)

        # Zeros and not `torch.empty`: the padding between records takes part in the sum.
        codes = torch.zeros(layout.message_bytes, dtype=torch.uint8, device=x.device)
        lost = outgoing.encode(codes, keys.up[rank])
        yield (Exchange.in_place("sum", codes.view(self.lane)),)

        bad = kernels.decode_sum(codes, maxima, layout.blocks, x, q, keys.up)
        self.link.restore(x, layout.whole, keys.rotation, store)
        lost.commit(x)
        return bad
