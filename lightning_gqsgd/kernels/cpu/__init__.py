from __future__ import annotations
import numpy as np, torch
from contextlib import contextmanager
from typing import NamedTuple
from functools import lru_cache
from lightning_gqsgd.kernels.cpu import blocks as B, linear as L, packing as P, scaled as S, rotation as R
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES, Share, scale_format, in_finite_range
from lightning_gqsgd.layout import START, LENGTH

class Scratch(NamedTuple):
    u: np.ndarray
    codes: np.ndarray
    other: np.ndarray
    mean: np.ndarray


@lru_cache
def kernels(lanes=False):
    return B.kernels(*S.records(L.flag_of, L.encode, L.decode, L.decode_sum, P.pack_lanes if lanes else P.pack_planes, P.unpack_lanes if lanes else P.unpack_planes))

def _real(dtype): return np.float64 if dtype == torch.float64 else np.float32
def _wide(dtype): return np.int64 if dtype == torch.float64 else np.int32

@lru_cache
def constants(q, dtype, sources=1):
    form, share, real, wide = scale_format(dtype), Share.of(sources), _real(dtype), _wide(dtype)
    f = L.Form(wide(np.iinfo(wide).max), form.shift, form.infinity, form.tiny, {2: np.uint16, 4: np.uint32}[form.nbytes](0), real(1), real(np.finfo(real).max), real(torch.finfo(dtype).max))
    return L.Linear(f, q.bits, real(share.each), real(share.rest), np.int32(q.levels//2), np.int32(q.odd_levels//2), real((q.levels-1)/2), real((q.odd_levels-1)/2), real((q.levels-1)/2)*real(sources), real(q.stochastic_from), q.nearest, real(1+2*np.finfo(real).eps))

@lru_cache
def scratch(block_size, dtype):
    size = block_size + 1
    mean = np.empty(size, _real(dtype))
    return Scratch(np.empty(size, np.float32), np.empty(size, np.uint8), np.empty(size, np.float32), mean)

def messages(wire, dtype): return wire.view(-1).numpy()
def keys_(keys): return np.array(keys, dtype=np.uint32).reshape(-1, 2)
def turn_(rotation, q, dtype):
    if rotation is None: return None
    return R.Turn(keys_([rotation])[0], (2.0 ** (-0.5 * np.arange(q.block_size.bit_length()))).astype(_real(dtype)))

@contextmanager
def _widened(x, blocks, write=False):
    compute, x = COMPUTE_DTYPES[x.dtype], x.detach()
    if compute == x.dtype or not len(blocks):
        values, table = x.to(compute).numpy(), blocks.numpy()
        yield values, values.view(_wide(x.dtype)), table
        return
    table = blocks.numpy().copy()
    first = int(table[:, START].min())
    part = x[first : int((table[:, START] + table[:, LENGTH]).max())]
    wide = part.to(compute)
    table[:, START] -= first
    yield wide.numpy(), wide.numpy().view(_wide(x.dtype)), table
    if write:
        part.copy_(wide)

def ks(q): return kernels(q.summable and 8 % q.bits != 0)
def encode(x, blocks, wire, q, key, scales=None, rotation=None):
    given = np.empty(0, _wide(x.dtype)) if scales is None else scales.numpy()
    with _widened(x, blocks) as (values, bits, table):
        ks(q)[0](values, table, given, keys_([key])[0], turn_(rotation, q, x.dtype), constants(q, x.dtype), scratch(q.block_size, x.dtype), messages(wire, x.dtype))
def reduce(wires, blocks, out, q, keys, out_key, dtype):
    ks(q)[1](messages(wires, dtype), wires.shape[1], blocks.numpy(), keys_(keys), keys_([out_key])[0], constants(q, dtype, len(keys)), scratch(q.block_size, dtype), messages(out, dtype))
def decode(wires, blocks, x, q, keys, rotation=None):
    with _widened(x, blocks, write=True) as (values, _, table):
        return ks(q)[2](messages(wires, x.dtype), wires.shape[1], table, values, keys_(keys), turn_(rotation, q, x.dtype), constants(q, x.dtype, len(keys)), scratch(q.block_size, x.dtype))
def decode_sum(wire, scales, blocks, x, q, keys):
    with _widened(x, blocks, write=True) as (values, _, table):
        return ks(q)[3](messages(wire, x.dtype), scales.numpy(), table, values, keys_(keys), constants(q, x.dtype, len(keys)), scratch(q.block_size, x.dtype))
