"""QSGD's entropy coder for messages: codes of a fixed width into Elias omega codes, and back, without loss.

`codewords` has the codes of one block, and their sources. A stream has these parts, one after the other:

1. The bytes of the message that belong to no code record: scales, raw records and padding, unchanged, in their order.
2. The records of all coded blocks, in the order of the table, bit after bit without alignment. The first bit is the
   highest bit of a byte.
3. Zeros to the end of the last byte.

No lengths are sent, because both sides have the table. Streams come from the network, so `expand` trusts nothing in
them.

Common arguments: ``message`` uint8 [bytes], one shard's, on the CPU; ``blocks`` its block table, int64 [B, COLUMNS]
(see `kernels.layout`), with positions counted from the start of ``message``; ``q`` the quantiser, of which ``bits`` and
``odd_levels``, K, matter, and whose codes must be linear and not summable.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.kernels.layout import ALIGNMENT, CODES, LENGTH, RAW
from lightning_gqsgd.kernels.packing import code_bytes
from lightning_gqsgd.kernels.protocol import Quantiser
from lightning_gqsgd.reducers.elias.reader import MOST, REASONS, read_records
from lightning_gqsgd.reducers.elias.tables import levels_of, tables_of
from lightning_gqsgd.reducers.elias.writer import write_records


def compressed_bits(message: Tensor, blocks: Tensor, q: Quantiser) -> int:
    """Returns the bits of all coded blocks' records in a stream, before it is filled up to a byte; the rest does not
    count.

    Raises:
        ValueError: as `compress`.
    """
    _, _, bits = _parts(message, blocks, q)
    return bits


def compress(message: Tensor, blocks: Tensor, q: Quantiser) -> Tensor:
    """Returns the stream of a message: uint8, of a length that depends on the codes.

    Raises:
        ValueError: ``q`` has an even K, more levels than codes, or codes that are summable or not linear; code records
            overlap or leave the message; a code is K or larger.
    """
    rest, records, _ = _parts(message, blocks, q)
    return torch.from_numpy(np.concatenate([*rest, records]))


def expand(stream: Tensor, blocks: Tensor, q: Quantiser, message_bytes: int) -> Tensor:
    """Returns the message behind ``stream``, uint8 [bytes], which `compress` has made; the message has
    ``message_bytes`` bytes.

    It is the message that was compressed, byte for byte, except that all padding within code records is zero.

    Raises:
        ValueError: ``stream`` is too short or too long, or has a count, gap or level out of range (other corruption
            cannot be told from another message; its codes are below K, too); or ``q`` or ``blocks`` as in `compress`.
    """
    tables = tables_of(levels_of(q))
    table = blocks.numpy()
    rest = _rest(table, message_bytes, q.bits)
    source = stream.numpy()
    first = sum(hi - lo for lo, hi in rest)
    if source.size < first:
        raise ValueError(f"corrupt stream: {source.size} bytes, of which scales and raw records alone need {first}")
    message = np.zeros(message_bytes, np.uint8)
    at = 0
    for lo, hi in rest:
        message[lo:hi] = source[at : at + hi - lo]
        at += hi - lo
    # Two words of zeros at the end: the kernel reads the word that its position lies in and the next one.
    end = 8 * (source.size - first)
    padded = np.zeros((end // 64 + 2) * 8, np.uint8)
    padded[: source.size - first] = source[first:]
    words = padded.view(">u8").astype(np.uint64)
    codes, _ = _scratch(table)
    used, block = read_records(words, end, table, q.bits, tables, codes, message)
    if used < 0:
        raise ValueError(f"corrupt stream: block {block}: {REASONS[used]}")
    if end - used >= 8 or padded[used // 8] & (0xFF >> used % 8):
        raise ValueError(f"corrupt stream: data after the last block, from bit {used} of {end} on")
    return torch.from_numpy(message)


def _parts(message: Tensor, blocks: Tensor, q: Quantiser) -> tuple[list[np.ndarray], np.ndarray, int]:
    """Returns the parts of a stream: what belongs to no code record, the records, and the number of their bits.

    Raises:
        ValueError: as `compress`.
    """
    tables = tables_of(levels_of(q))
    table = blocks.numpy()
    rest = _rest(table, message.numel(), q.bits)
    codes, positions = _scratch(table)
    coded = table[table[:, RAW] != 1, LENGTH]
    most = len(coded) * 2 + int(coded.sum()) * int(tables.dense_length.max())
    words = np.empty(most // 32 + 2, np.uint32)
    source = np.ascontiguousarray(message.numpy())
    bits = write_records(source, table, q.bits, tables, codes, positions, words)
    if bits < 0:
        raise ValueError(f"the message has a code beyond the {levels_of(q)} levels of its quantiser")
    records = words[: -(-bits // 32)].astype(">u4").view(np.uint8)[: -(-bits // 8)]
    return [source[lo:hi] for lo, hi in rest], records, bits


def _rest(table: np.ndarray, message_bytes: int, bits: int) -> list[tuple[int, int]]:
    """Returns the byte ranges of a message that belong to no code record, in order.

    Raises:
        ValueError: records overlap or leave the message.
    """
    coded = table[table[:, RAW] != 1]
    coded = coded[np.argsort(coded[:, CODES], kind="stable")]
    size = -(-code_bytes(coded[:, LENGTH], bits) // ALIGNMENT) * ALIGNMENT
    low = np.concatenate([[0], coded[:, CODES] + size])
    high = np.concatenate([coded[:, CODES], [message_bytes]])
    if (low > high).any() or (coded[:, LENGTH] < 0).any() or (coded[:, LENGTH] > MOST).any():
        raise ValueError(f"the code records of the block table do not lie side by side in {message_bytes} bytes")
    used = low < high
    return list(zip(low[used].tolist(), high[used].tolist(), strict=True))


def _scratch(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the space for the codes of one block, and for the positions of its non-zeros."""
    size = int(table[:, LENGTH].max()) + 1 if len(table) else 1  # positions are written one beyond the last
    return np.empty(size, np.uint8), np.empty(size, np.int32)
