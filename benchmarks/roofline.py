"""Picture of kernels under their roof: coordinates per second against bytes per coordinate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from pictures.labels import label_points
from pictures.style import COLOURS, drawn

#: Size of the buckets that are drawn, in 10^6 bytes, if this size was measured.
MEGABYTES = 100.0
#: Share of the roof at which a second line is drawn.
SHARE = 0.85

#: Family -> its colour, and its name in the legend.
FAMILIES = {
    "gqsgd": (COLOURS["gqsgd"], "gqsgd"),
    "torch's hooks": (COLOURS["ddp_fp16"], "torch's fp16 and bf16 hooks"),
    "torch operations": (COLOURS["gqsgd_4bit"], "torch operations"),
    "torch.compile": (COLOURS["powersgd"], "the same, torch.compile"),
    "Global-QSGD": (COLOURS["ddp"], "Global-QSGD's code, counted"),
}
MARKERS = {"encode": "^", "reduce": "o", "decode": "v", "all": "D"}


@dataclass(frozen=True)
class Fact:
    """One stage of one case on a bucket.

    Attributes:
        case: name of the case.
        family: name that all cases of one author share.
        stage: one of `gpu_kernels.STAGES`, or "copy_" or "all".
        megabytes: size of the bucket in 10^6 bytes.
        dtype: dtype of the bucket.
        numel: number of coordinates of the bucket.
        seconds: median time on the device.
        nbytes: bytes that the stage has to move.
        of_copy: median over rounds of bytes per second, as a share of the copy's bytes per second in the same round.
        host_seconds: median time in which the host issues the stage, with the device idle before; None: not measured.
    """

    case: str
    family: str
    stage: str
    megabytes: float
    dtype: str
    numel: int
    seconds: float
    nbytes: float
    of_copy: float
    host_seconds: float | None = None


def save_figure(facts: Sequence[Fact], device: str, file: Path) -> None:
    """Draw a panel for each dtype.

    The size is the largest up to `MEGABYTES` that was measured in all dtypes, or else the smallest such size.

    Raises:
        ValueError: the dtypes have no size in common.
    """
    sizes = common_sizes(facts)
    if not sizes:
        raise ValueError("no size was measured in all dtypes, which one picture needs; measure the same sizes in each")
    megabytes = max((size for size in sizes if size <= MEGABYTES), default=min(sizes))
    shown = [fact for fact in facts if fact.megabytes == megabytes]
    dtypes = list(dict.fromkeys(fact.dtype for fact in shown))
    with drawn(file, figsize=(6.2 * len(dtypes), 6.2), layout="constrained") as figure:
        panels = figure.subplots(1, len(dtypes), sharex=True, sharey=True, squeeze=False)[0]
        for axes, dtype in zip(panels, dtypes, strict=True):
            _draw_points(axes, [fact for fact in shown if fact.dtype == dtype and fact.stage != "copy_"])
        roofs = {fact.dtype: fact.nbytes / fact.seconds / 1e9 for fact in shown if fact.stage == "copy_"}
        words = [_draw_roof(axes, roofs[dtype]) for axes, dtype in zip(panels, dtypes, strict=True)]
        for axes, dtype in zip(panels, dtypes, strict=True):
            axes.set(title=dtype, xlabel="bytes moved per coordinate")
        figure.suptitle(
            f"Kernels on {device}, buckets of {megabytes:g} MB", x=0.01, ha="left", fontsize=11, fontweight="bold"
        )
        panels[0].set_ylabel("billions of coordinates per second")
        _draw_legend(figure, {fact.family for fact in shown}, {fact.stage for fact in shown})
        for axes, dtype, said in zip(panels, dtypes, words, strict=True):
            own = [fact for fact in shown if fact.dtype == dtype and fact.stage != "copy_"]
            colours = [FAMILIES[fact.family][0] for fact in own]
            label_points(figure, axes, [*map(_point, own)], [fact.case for fact in own], colours, size=8, taken=[said])


def common_sizes(facts: Sequence[Fact]) -> set[float]:
    """Sizes in 10^6 bytes that were measured in every dtype."""
    by_dtype: dict[str, set[float]] = {}
    for fact in facts:
        by_dtype.setdefault(fact.dtype, set()).add(fact.megabytes)
    return set.intersection(*by_dtype.values())


def _point(fact: Fact) -> tuple[float, float]:
    return fact.nbytes / fact.numel, fact.numel / fact.seconds / 1e9


def _draw_points(axes: Axes, facts: Sequence[Fact]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    for fact in facts:
        colour = FAMILIES[fact.family][0]
        face = "white" if fact.family == "Global-QSGD" else colour
        look: dict[str, Any] = {"mfc": face, "mec": colour if face == "white" else "white", "mew": 1.0}
        axes.plot(*_point(fact), ls="", marker=MARKERS[fact.stage], ms=7, zorder=4, **look)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.2, y=0.07)


def _draw_roof(axes: Axes, bandwidth: float) -> Text:
    """Draw the rate of a copy, in GB/s, as a line over bytes per coordinate, and a second line a little below; returns
    the words that say so."""
    left, right = axes.get_xlim()
    left /= 2  # room for the names beside the points
    bottom, top = axes.get_ylim()
    x = np.geomspace(left / 2, right * 2)
    axes.plot(x, bandwidth / x, color="#555555", lw=1.6, zorder=2)
    axes.plot(x, SHARE * bandwidth / x, color="#999999", lw=0.8, zorder=2)
    axes.fill_between(x, bandwidth / x, 10 * top, color="#f0f0f3", lw=0, zorder=0)
    axes.set(xlim=(left, right), ylim=(bottom, top))
    return axes.text(
        0.98,
        0.98,
        f"roof: copy_, {bandwidth:,.0f} GB/s\nthin line: {SHARE:.0%} of it",
        transform=axes.transAxes,
        ha="right",
        va="top",
        fontsize=8,
        color="#555555",
    )


def _draw_legend(figure: Figure, families: set[str], stages: set[str]) -> None:
    """Explain colours and markers under the panels."""
    handles = [
        Line2D([], [], ls="", marker="s", ms=7, color=colour, label=label)
        for family, (colour, label) in FAMILIES.items()
        if family in families
    ]
    grey: dict[str, Any] = {"ls": "", "ms": 7, "color": "#888888"}
    names = {stage: stage for stage in MARKERS} | {"all": "encode and decode"}
    handles += [
        Line2D([], [], marker=marker, label=names[stage], **grey)
        for stage, marker in MARKERS.items()
        if stage in stages
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, handletextpad=0.1)
