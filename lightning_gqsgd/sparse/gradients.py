"""The sparse gradients of a DDP model's tables: the entry point for the hook.

DDP has a separate bucket for each parameter of which it expects a sparse gradient, and passes the sparse tensor to the
hook as soon as it is computed. So tables are reduced during the backward pass, together with dense buckets and in the
same order on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import setting_of
from lightning_gqsgd.errors import counted
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES, in_finite_range
from lightning_gqsgd.reducers import StepKeys, Steps, new_store
from lightning_gqsgd.reducers.base import ALL, side_by_side
from lightning_gqsgd.session.parameters import Parameter
from lightning_gqsgd.sparse import row_numbers
from lightning_gqsgd.sparse.gathering import Mean, all_gathered, gathered_mean, gathered_unions
from lightning_gqsgd.sparse.rows import rows_for
from lightning_gqsgd.sparse.sketching import sketched_mean
from lightning_gqsgd.sparse.tables import Table, Touched, gradient_of, touched_rows
from lightning_gqsgd.wire.engine import Engine, Request
from lightning_gqsgd.wire.telemetry import BucketCounters

logger = logging.getLogger(__name__)


class SparseGradients:
    """Replaces sparse gradients by their mean over ranks.

    Args:
        engine: the engine that runs jobs. Creating this object may be a collective, so all ranks have to create one.
        configs: the configurations that steps may have, with the chosen reducers.
        tables: the tables of the model that may have sparse gradients.
        dtype: dtype of the gradients. Kernels are compiled for its compute dtype, in which rows are encoded.
    """

    def __init__(
        self, engine: Engine, configs: list[GQSGDConfig], tables: Sequence[Parameter], dtype: torch.dtype
    ) -> None:
        self._engine = engine
        self._method = configs[0].sparse
        self._limit = configs[0].sparse_limit
        self._tables = {table.number: table for table in tables}
        self._said: set[int] = set()
        for config in configs:
            # Stage 1 gathers lengths. If a table is reduced whole, the reducer's own stages follow.
            setting = setting_of(config, engine.world_size, torch.float32)  # any dtype will do: the stages are the same
            later = [tuple(dict.fromkeys((ALL, *scopes))) for scopes in setting.reducer.scopes(setting)]
            engine.communicator.extend([(ALL,), *later])  # at least three stages
        engine.compile(configs, [COMPUTE_DTYPES[dtype]])

    @property
    def numbers(self) -> frozenset[int]:
        """Numbers of the tables whose rows are sent; empty with ``sparse_limit=0``, because all gradients are dense
        then."""
        return frozenset(self._tables if self._limit else ())

    def describe(self, configs: Sequence[GQSGDConfig]) -> str:
        """Returns a clause for the report on the rows that are sent of the tables.

        Args:
            configs: as for the report: the configuration, or one configuration for each number of bits by name.
        """
        if not self._limit:
            return f"{counted(len(self._tables), 'table')} with sparse gradients, whole (sparse_limit=0)"
        of_bits = {config.num_bits: config for config in configs}
        ways: dict[str, int] = {}
        for table in self._tables.values():
            config = configs[0] if table.bits is None else of_bits[table.bits]
            way = config.describe_rows(raw=table.raw)
            ways[way] = ways.get(way, 0) + 1
        said = [f"of {counted(n, 'table')}, the touched rows only ({self._method}: {way})" for way, n in ways.items()]
        return "; ".join(
            [*said, f"whole tables as dense gradients in steps with more rows than sparse_limit={self._limit:g}"]
        )

    def reduce(self, gradient: Tensor, request: Request) -> torch.futures.Future[Tensor]:
        """Start to compute the mean of a table's sparse gradient over ranks.

        Args:
            gradient: sparse tensor, [height, width]. If the job fails, its values are NaN.
            request: the request; its only segment is the table.

        Returns:
            A future that completes with a coalesced sparse gradient with the same bits on every rank.
        """
        request = request.alone()
        means: list[Tensor] = []

        def steps(counters: BucketCounters) -> Steps:
            mean = yield from self._mean(gradient, request, counters)
            values = in_finite_range(mean.values, gradient.dtype).to(gradient.dtype)
            means.append(gradient_of(mean.rows, values, gradient))
            return int((~values.isfinite()).any(dim=1).sum())

        job = self._engine.run(gradient._values(), request, steps)

        def result(future: torch.futures.Future[Tensor]) -> Tensor:
            future.value()  # raises the job's error
            return means[0] if means else gradient.coalesce()  # no mean if there was nothing to reduce

        return job.future.then(result)

    def _mean(self, gradient: Tensor, request: Request, counters: BucketCounters) -> Mean:
        engine = self._engine
        (config,) = request.configs
        ((number, numel, raw, _),) = request.segments
        height = gradient.shape[0]
        table = Table(number, height, numel // height if height else 0, raw)
        touched = touched_rows(gradient, table.width)
        counters.calls += 1
        counters.numel += touched.values.numel()
        sketches = config.sparse == "sketch" and request.compressed
        numbers = row_numbers.write(touched.rows.numpy())
        bad = int((~touched.values.isfinite()).any(dim=1).sum())
        own = torch.tensor([len(touched.rows), bad if sketches else len(numbers)])
        lengths = yield from all_gathered(own, engine.world_size, counters)
        rows = int(lengths[:, 0].sum())
        if not rows:
            return touched
        if rows > config.sparse_limit * height:
            self._say(table, rows, config)
            return (yield from self._dense(table, touched, gradient.dtype, request, counters))
        keys = StepKeys.of(config.seed, request.step, engine.world_size)
        if sketches:
            bad = int(lengths[:, 1].sum())
            return (yield from sketched_mean(table, touched, bad, keys.rotation, engine.world_size, counters))
        form = rows_for(table, config, gradient.dtype, keys, compressed=request.compressed)
        return (yield from gathered_mean(table, touched, numbers, lengths, form, engine.rank, counters))

    def _dense(
        self, table: Table, touched: Touched, dtype: torch.dtype, request: Request, counters: BucketCounters
    ) -> Mean:
        """Reduce the whole table like the gradient of an embedding without ``sparse=True``, with the same bits.

        Ranks also gather a bit for each row, so that all ranks know which rows were touched. The mean has only these
        rows, because a dense reduction adds noise to other rows that share a block with them.
        """
        engine = self._engine
        whole = torch.zeros(table.height, table.width, dtype=dtype)
        whole[touched.rows] = touched.values.to(dtype)
        x = whole.view(-1)
        plan = engine.plan(x, request)
        store = request.store or new_store(plan.setting, {}, x.device)
        pieces = [start() for start in plan.starts(x, engine.rank, request.step, store, counters, engine.telemetry)]
        counters.calls -= 1  # the plan counts this call and its coordinates
        counters.numel -= touched.values.numel()
        unions: list[Tensor] = []

        def gathered() -> Steps:
            unions.extend((yield from gathered_unions(table, [touched.rows], engine.world_size, counters)))
            return 0

        yield from side_by_side(gathered(), *pieces)
        (union,) = unions
        return Touched(union, whole[union])

    def _say(self, table: Table, rows: int, config: GQSGDConfig) -> None:
        if self._engine.rank == 0 and table.number not in self._said:
            logger.warning(
                "gqsgd: the gradient of %r is reduced as a dense one in this step: ranks touch %d rows of %d, added "
                "up, and sparse_limit=%s. This is logged once; if it happens often, sparse=False is faster",
                self._tables[table.number].name if table.number in self._tables else table.number,
                rows,
                table.height,
                config.sparse_limit,
            )
        self._said.add(table.number)
