"""The paper's own performance model, in closed form (Global-QSGD, arXiv 2305.18627)."""

from __future__ import annotations

import math


def tree_seconds(
    nbytes: float,
    ranks: int,
    *,
    latency_s: float,
    bytes_per_s: float,
    reduce_bytes_per_s: float,
    ratio: float = 1.0,
    slowdown: float = 1.0,
) -> float:
    """Returns the seconds of an all-reduce along a binary tree, T = 2 L α + 2 L S/(ρ β) + L ω S/(ρ γ) with L = log2 n.

    The formula has five errors that `lightning_gqsgd.predict` does not have:

    * Nothing overlaps: neither a bucket with the backward pass, nor encoding with sending.
    * The baseline is the same tree, which sends log2 n times as much as a ring: against a ring, gains are smaller.
    * Encoding and decoding take no time.
    * α has no effect on the comparison, so that many small buckets look as good as one large bucket.
    * ω is a property of one kernel (79 in the paper, for one that does its arithmetic in fp64), not of the method.

    Args:
        nbytes: S, bytes of the gradient.
        ranks: n, at least 2.
        latency_s: α, latency of one hop.
        bytes_per_s: β, rate of a link.
        reduce_bytes_per_s: γ, rate at which a rank adds two gradients.
        ratio: ρ, the compression ratio; 4 for codes of 8 bits.
        slowdown: ω, the factor by which adding codes takes longer than adding integers.
    """
    depth = math.log2(ranks)
    sent = nbytes / ratio
    return 2 * depth * latency_s + 2 * depth * sent / bytes_per_s + depth * slowdown * sent / reduce_bytes_per_s
