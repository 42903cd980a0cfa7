"""QSGD's entropy coder for messages: converts codes of a fixed width to Elias omega codes, and back, without loss.

Sources: P. Elias, Universal codeword sets and representations of the integers, IEEE Trans. Inf. Theory 21(2), 1975;
D. Alistarh et al., QSGD, NIPS 2017, arXiv 1610.02132, which describes the code of sparse vectors. The paper only cites
the code of dense vectors. Elias(|l| + 1) is our choice, and meets the paper's bound of 2.8 bits per coordinate at
s = sqrt(d).

A code c is an integer 0 to K-1, K odd, and stands for level l = c - K//2. Let Elias(k) be the omega code of k >= 1. A
sign bit is 1 for l < 0. The record of a block of n coordinates is the shortest of these forms. It is "sparse" if the
sparse and the dense form are equally short:

    void     11                                                                     all codes are 0, not all levels
    sparse   0   Elias(non-zeros + 1), then per non-zero: Elias(gap), sign bit, Elias(|l|)
    dense    10  per coordinate: Elias(|l| + 1), then for a non-zero: sign bit

A gap counts from the previous non-zero. The first gap counts from position -1. Blocks whose scale is zero or not finite
have codes 0 in a message. The void form exists for them, because code 0 is the lowest level, which has the longest
omega code.

A stream has these parts, one after the other:

1. The bytes of the message that are not in a code record: scales, raw records and padding, unchanged and in order.
2. The records of all coded blocks, in the order of the table, bit after bit without alignment. The first bit is the
   highest bit of a byte.
3. Zeros to the end of the last byte.

No lengths are sent, because both sides have the table. Streams come from the network, so `expand` trusts nothing in
them.

Common arguments: ``message`` is one shard's message, uint8 [bytes], on the CPU. ``blocks`` is its block table, int64
[B, COLUMNS] (see `kernels.layout`), whose positions count from the start of ``message``. ``q`` is the quantiser. Its
codes must be linear and not summable; only its ``bits`` and ``odd_levels``, K, are used.
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


def compress(message: Tensor, blocks: Tensor, q: Quantiser) -> Tensor:
    """Returns the stream of a message: uint8, of a length that depends on the codes.

    Raises:
        ValueError: if ``q`` has an even K, more levels than codes, or codes that are summable or not linear; if code
            records overlap or are not within the message; or if a code is K or larger.
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
    return torch.from_numpy(np.concatenate([*(source[lo:hi] for lo, hi in rest), records]))


def expand(stream: Tensor, blocks: Tensor, q: Quantiser, message_bytes: int) -> Tensor:
    """Returns the message of ``message_bytes`` bytes from a stream of `compress`, uint8 [bytes].

    It equals the message that was compressed, byte for byte, except that all padding within code records is zero.

    Raises:
        ValueError: if ``stream`` is too short or too long, or has a count, gap or level out of range. Other corruption
            cannot be distinguished from another message, but all codes are below K. Also if ``q`` or ``blocks`` are
            wrong, see `compress`.
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
    # There are two words of zeros at the end, because the kernel reads the word at its position and the next word.
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


def _rest(table: np.ndarray, message_bytes: int, bits: int) -> list[tuple[int, int]]:
    """Returns the byte ranges of a message that are not in a code record, in order.

    Raises:
        ValueError: if records overlap or are not within the message.
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
    """Returns scratch space for the codes of one block, and for the positions of its non-zeros."""
    size = int(table[:, LENGTH].max()) + 1 if len(table) else 1  # one position is written beyond the last
    return np.empty(size, np.uint8), np.empty(size, np.int32)
