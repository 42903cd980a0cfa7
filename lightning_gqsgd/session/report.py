"""Reports on a training: the compression at its start, and bytes, errors and waiting at its end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import counted
from lightning_gqsgd.presets import PRESETS
from lightning_gqsgd.reducers import REDUCERS
from lightning_gqsgd.reducers.base import ring_bytes
from lightning_gqsgd.session.parameters import Parameter
from lightning_gqsgd.wire.telemetry import BucketCounters, Telemetry

FP32_BYTES = 4


def report(
    requested: GQSGDConfig,
    configs: Sequence[GQSGDConfig],
    trained: Sequence[Parameter],
    world_size: int,
    step: int,
    noun: str = "gradient value",
    *,
    has_tables: bool = False,
) -> str:
    """Returns the line for a DDP model.

    Args:
        requested: the configuration as the user gave it.
        configs: this configuration with the chosen reducer, or one configuration for each number of bits by name.
        trained: the parameters whose gradients are reduced.
        world_size: number of ranks.
        step: number of steps so far.
        noun: the word for a compressed number, in the singular.
        has_tables: whether tables with sparse gradients, which are not among ``trained``, are reduced as well.
    """
    if world_size == 1:
        return "gqsgd: one process, nothing to reduce"
    config = configs[0]
    if has_tables and not trained:
        return f"gqsgd: tables over {world_size} ranks"
    if not any(REDUCERS[one_width.reducer].compresses for one_width in configs):
        is_one_node = requested.reducer != config.reducer
        cause = f"all {world_size} ranks are on one node" if is_one_node else f"reducer={config.reducer!r}"
        return f"gqsgd: {config.reducer} all-reduce over {world_size} ranks, nothing compressed ({cause})"
    of_bits = {one_width.num_bits: one_width for one_width in configs}
    coded: dict[GQSGDConfig, list[Parameter]] = {one_width: [] for one_width in configs}
    raw: list[Parameter] = []
    for parameter in trained:
        own = config if parameter.bits is None else of_bits[parameter.bits]
        (raw if parameter.raw and own.codec != "float" else coded[own]).append(parameter)
    if not any(coded.values()) and has_tables:
        return f"gqsgd: tables over {world_size} ranks; uncompressed: {_raw(raw, config)}"
    if not any(coded.values()):
        return (
            f"gqsgd: NOTHING IS COMPRESSED over {world_size} ranks: {_raw(raw, config)}. Parameters of at least "
            f"min_numel={config.min_numel} values would be, unless they are excluded; {_remedy(raw, config)}"
        )
    ways = [
        f"{in_tensors([parameter.numel for parameter in parameters], noun)} at {own.describe()} by {own.reducer}"
        for own, parameters in coded.items()
        if parameters
    ]
    text = f"gqsgd: {', '.join(ways)} over {world_size} ranks"
    if config.node_size:
        text += f" ({world_size // config.node_size} nodes of {config.node_size})"
    if raw:
        text += f"; uncompressed: {_raw(raw, config)}"
    if config.warmup_steps > step:
        text += f"; uncompressed until step {config.warmup_steps}"
    return text + "".join(_other_codec(own) for own, parameters in coded.items() if parameters)


def _other_codec(config: GQSGDConfig) -> str:
    """Returns a clause that says that the preset with the same number of bits uses another codec; empty if it does not.

    ``gqsgd_2bit`` uses EDEN, and so does ``bits=2``, unless another field asks for companded codes.
    """
    name = f"gqsgd_{config.num_bits}bit"
    if config.codec != "companded" or name not in PRESETS or PRESETS[name].config.codec == config.codec:
        return ""
    other = PRESETS[name].config.codec
    return f"; preset={name!r} is another codec, {other}, not {config.codec}"


def _raw(raw: Sequence[Parameter], config: GQSGDConfig) -> str:
    """Returns in words how many parameters are sent uncompressed, and why."""
    small = [parameter for parameter in raw if parameter.numel < config.min_numel]
    why = [f"{len(small)} smaller than {config.min_numel}"] if small else []
    why += [f"{len(raw) - len(small)} excluded by name"] if len(raw) > len(small) else []
    return f"{in_tensors([parameter.numel for parameter in raw], 'value')} ({', '.join(why)})"


def _remedy(raw: Sequence[Parameter], config: GQSGDConfig) -> str:
    """Returns what to change where all parameters are sent uncompressed."""
    if all(parameter.numel < config.min_numel for parameter in raw):
        return "lower min_numel, or give a larger model"
    return "exclude fewer of them"


def in_tensors(numels: Sequence[int], noun: str, kind: str = "tensor") -> str:
    """Returns in words how many numbers there are in so many tensors."""
    return f"{counted(sum(numels), noun)} in {counted(len(numels), kind)}"


def ring_bytes_in_fp32(buckets: Iterable[BucketCounters], ranks: int) -> int:
    """Returns the bytes that this rank would have sent in ring all-reduces of the same numbers in fp32."""
    return ring_bytes(FP32_BYTES * sum(bucket.numel for bucket in buckets), ranks)


def summary(telemetry: Telemetry, fp32_bytes: float) -> dict[str, float]:
    """Returns bytes, bits, errors and times since the hook was created, as counted on this rank. Waits for a GPU.

    Returns:
        Numbers by name, which are NaN if nothing was measured:

        * ``steps``: number of averaged steps.
        * ``bytes_sent``: bytes that this rank has sent.
        * ``fp32_bytes``: bytes that this rank would have sent in fp32, as it is given.
        * ``compression_ratio``: ``fp32_bytes`` divided by ``bytes_sent``.
        * ``bits_per_coordinate``: bits of one rank's messages, including scales, padding and uncompressed parameters.
        * ``mean_rel_l2``: relative L2 error of the gradients' mean, over all sampled coordinates.
        * ``step_s``, ``exposed_s``: median seconds of a step, and of its wait for gradients, of the latest steps.
        * ``waiting_share``: ``exposed_s`` divided by ``step_s``, 0 to 1.
    """
    totals = telemetry.totals()
    sent = totals["bytes_sent"]
    error = telemetry.error
    reference = telemetry.reference
    step_s, exposed_s = telemetry.median_step()
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


def in_words(values: Mapping[str, float], sends: str = "gradients") -> str:
    """Returns the line for the end of a training, from the values of `summary` and the word for what ranks send."""
    steps = counted(int(values["steps"]), "step")
    if not values["bytes_sent"]:
        return f"gqsgd: {steps}, in which this process has sent no {sends}"
    sent = _megabytes(values["bytes_sent"])
    ratio = values["compression_ratio"]
    times = f"{max(ratio, 1 / ratio):.1f}"
    if times == "1.0":  # nothing is compressed, or little of what is sent
        compared = ", about as much as in fp32"
    else:
        whole = _megabytes(values["fp32_bytes"])
        compared = f" instead of {whole} in fp32, {times} times {'less' if ratio > 1 else 'more'}"
    parts = [
        f"gqsgd: in {steps}, rank 0 sent {sent} of {sends}{compared} "
        f"({values['bits_per_coordinate']:.2f} bits per coordinate)"
    ]
    if not math.isnan(values["mean_rel_l2"]):
        parts.append(f"the relative error of the mean gradient was {values['mean_rel_l2']:.2%}".replace("%", " %"))
    if not math.isnan(values["waiting_share"]):
        waited = f"{values['waiting_share']:.0%}".replace("%", " %")
        parts.append(f"a step took {1e3 * values['step_s']:.1f} ms, and waited for gradients in {waited} of it")
    return "; ".join(parts)


def _megabytes(count: float) -> str:
    """Returns a number of bytes in words. A small one keeps two digits."""
    megabytes = count / 1e6
    return f"{megabytes:,.1f} MB" if megabytes >= 0.95 else f"{megabytes:.2g} MB"
