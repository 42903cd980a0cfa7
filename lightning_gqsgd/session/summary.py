"""A summary of compression in a training, as numbers and as one line: bytes, error, and how long steps waited."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lightning_gqsgd.errors import counted
from lightning_gqsgd.wire.telemetry import Telemetry

FP32_BYTES = 4


def summary(telemetry: Telemetry, ranks: int) -> dict[str, float]:
    """Returns what compression did since the hook was made, as this rank has counted it. Waits for a GPU.

    Args:
        telemetry: counters of this process.
        ranks: number of ranks.

    Returns:
        Numbers by name; NaN stands for what nothing has measured:

        * ``steps``: averaged steps.
        * ``bytes_sent``: bytes of gradients that this rank has sent.
        * ``fp32_bytes``: bytes that this rank would have sent in ring all-reduces of the same gradients in fp32.
        * ``compression_ratio``: ``fp32_bytes`` over ``bytes_sent``.
        * ``bits_per_coordinate``: of one rank's messages, with scales, padding and what travels uncompressed.
        * ``mean_rel_l2``: relative L2 error of the gradients' mean, over all sampled coordinates.
        * ``step_s``, ``exposed_s``: median seconds of a step, and of its wait for gradients, of the latest steps.
        * ``waiting_share``: ``exposed_s`` over ``step_s``, 0 to 1.
    """
    totals = telemetry.totals()
    numel = sum(bucket.numel for bucket in telemetry.buckets.values())
    fp32_bytes = 2 * (ranks - 1) / ranks * FP32_BYTES * numel
    sent = totals["bytes_sent"]
    error = telemetry.error
    reference = telemetry.reference
    step_s = telemetry.lengths.step_s
    exposed_s = telemetry.lengths.exposed_s
    return {
        "steps": totals["steps"],
        "bytes_sent": sent,
        "fp32_bytes": fp32_bytes,
        "compression_ratio": fp32_bytes / sent if sent else math.nan,
        "bits_per_coordinate": totals["bits_per_coordinate"],
        "mean_rel_l2": math.sqrt(error / reference) if reference > 0 else math.nan,
        "step_s": step_s,
        "exposed_s": exposed_s,
        "waiting_share": min(1.0, exposed_s / step_s) if step_s > 0 else math.nan,
    }


def in_words(values: Mapping[str, float]) -> str:
    """The line that is said at the end of a training.

    Args:
        values: what `summary` gives.
    """
    steps = counted(int(values["steps"]), "step")
    if not values["bytes_sent"]:
        return f"gqsgd: {steps}, in which this process has sent no gradients"
    sent = values["bytes_sent"] / 1e6
    whole = values["fp32_bytes"] / 1e6
    ratio = values["compression_ratio"]
    times = f"{ratio:.1f} times less" if ratio >= 1 else f"{1 / ratio:.1f} times more"
    parts = [
        f"gqsgd: in {steps}, rank 0 sent {sent:,.1f} MB of gradients instead of {whole:,.1f} MB in fp32, {times} "
        f"({values['bits_per_coordinate']:.2f} bits per coordinate)"
    ]
    if not math.isnan(values["mean_rel_l2"]):
        parts.append(f"the relative error of the mean gradient was {values['mean_rel_l2']:.2%}".replace("%", " %"))
    if not math.isnan(values["waiting_share"]):
        waited = f"{values['waiting_share']:.0%}".replace("%", " %")
        parts.append(f"a step took {1e3 * values['step_s']:.1f} ms, and waited for gradients in {waited} of it")
    return "; ".join(parts)
