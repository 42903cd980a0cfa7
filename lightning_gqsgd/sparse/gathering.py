"""The exchange of touched rows: every rank gets the messages of all ranks, and adds them up in rank order.

Stage 1 gathers lengths, two integers per rank: the number of touched rows and the bytes of their row numbers. Then all
ranks know all lengths, so they choose the same next stage. Stage 2 gathers the messages, each as long as the longest
one, a multiple of 16 bytes:

    rows (see `rows`), row numbers (see `row_numbers`)

All ranks decode the same bytes in the same order, so the mean has the same bits on every rank.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.kernels.layout import ALIGNMENT
from lightning_gqsgd.kernels.wire import Share
from lightning_gqsgd.reducers import Exchange
from lightning_gqsgd.sparse import row_numbers
from lightning_gqsgd.sparse.rows import Rows
from lightning_gqsgd.sparse.tables import Table, Touched
from lightning_gqsgd.wire.telemetry import BucketCounters

#: Steps that end with the touched rows of all ranks and their mean.
Mean = Generator[Sequence[Exchange], None, Touched]


def all_gathered(sent: Tensor, ranks: int, counters: BucketCounters) -> Generator[Sequence[Exchange], None, Tensor]:
    """Run a stage that returns the tensors of all ranks, [ranks, ...]."""
    received = sent.new_empty(ranks, *sent.shape)
    counters.add_sent((ranks - 1) * sent.nbytes, sent.nbytes)
    yield (Exchange("all_gather", received, sent),)
    return received


def gathered_mean(
    table: Table,
    touched: Touched,
    numbers: np.ndarray,
    lengths: Tensor,
    rows: Rows,
    rank: int,
    counters: BucketCounters,
) -> Mean:
    """Run stage 2 of a gather, which returns the mean of all ranks' rows.

    Args:
        table: the table.
        touched: the rows that this rank has touched. Their values may be changed.
        numbers: the stream of this rank's row numbers.
        lengths: the lengths of all ranks, the result of stage 1, int64 [ranks, 2].
        rows: the format in which rows are written.
        rank: this rank.
        counters: counters of the bucket.
    """
    counts = [(int(count), int(number_bytes)) for count, number_bytes in lengths.tolist()]
    longest = max(rows.nbytes(count) + number_bytes for count, number_bytes in counts)
    longest = -(-longest // ALIGNMENT) * ALIGNMENT
    sent = torch.zeros(longest, dtype=torch.uint8)
    own = rows.nbytes(len(touched.rows))
    rows.write(touched, sent[:own], rank)
    sent[own : own + len(numbers)] = torch.from_numpy(numbers)
    received = yield from all_gathered(sent, len(counts), counters)

    messages = []
    for source, (count, number_bytes) in enumerate(counts):
        end = rows.nbytes(count)
        stream = received[source, end : end + number_bytes].numpy()
        theirs = torch.from_numpy(row_numbers.read(stream, count, table.height))
        messages.append(Touched(theirs, rows.read(received[source, :end], theirs, source)))
    return mean_of(messages)


def gathered_unions(
    table: Table, marks: Sequence[Tensor], ranks: int, counters: BucketCounters
) -> Generator[Sequence[Exchange], None, list[Tensor]]:
    """Gather a bit for each row of a table, which returns the rows that at least one rank has marked, ascending.

    Args:
        table: the table.
        marks: the rows that this rank marks, in one or several sets. There is one result for each set.
        ranks: number of ranks.
        counters: counters of the bucket.
    """
    bits = np.zeros((len(marks), table.height), dtype=np.uint8)
    for line, rows in zip(bits, marks, strict=True):
        line[rows.numpy()] = 1
    sent = torch.from_numpy(np.packbits(bits, axis=1)).flatten()
    received = yield from all_gathered(sent, ranks, counters)
    everyone = np.bitwise_or.reduce(received.numpy(), axis=0).reshape(len(marks), -1)
    return [torch.from_numpy(np.flatnonzero(np.unpackbits(line, count=table.height))) for line in everyone]


def mean_of(messages: Sequence[Touched]) -> Touched:
    """Returns the mean over ranks of the rows that at least one rank has touched, summed in rank order."""
    share = Share.of(len(messages))
    union = torch.cat([message.rows for message in messages]).unique()
    first = messages[0].values
    total = torch.zeros(len(union), first.shape[1], dtype=first.dtype)
    for message in messages:
        places = torch.searchsorted(union, message.rows)
        total[places] += message.values * share.each  # no row occurs twice in one message
    return Touched(union, total / share.rest)
