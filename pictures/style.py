"""Colours, text sizes and the file of all pictures."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Colour of each strategy in every picture. The first ones are Okabe and Ito's, distinguishable with colour blindness.
COLOURS = {
    "ddp": "#4d4d4d",
    "ddp_bf16": "#56b4e9",
    "ddp_fp16": "#0072b2",
    "powersgd": "#cc79a7",
    "gqsgd": "#d55e00",
    "gqsgd_4bit": "#009e73",
    "gqsgd_3bit": "#4daf4a",
    "gqsgd_2bit": "#984ea3",
    "gqsgd_trellis": "#c77dff",
    "gqsgd_auto": "#f564a9",
    "gqsgd_sum": "#e69f00",
    "gqsgd_exponential": "#8c510a",
    "gqsgd_exponential_tree": "#bf9b5a",
    "global_qsgd_linear": "#6b705c",
    "global_qsgd_exponential": "#b08968",
    "qsgd": "#2c4fa3",
    "qsgd_elias": "#7b6fd0",
    "terngrad": "#b2182b",
    "natural_compression": "#1b7837",
    "natural_dithering": "#7fae2f",
    "wyner_ziv": "#5e4b8b",
    "dq_psgd": "#e0268a",
    "drive": "#c7522a",
    "eden": "#3d405b",
    "ecq_sgd": "#7b3294",
    "diana": "#00a5b5",
    "artemis": "#00687a",
    "dore": "#5cb8a0",
    "cd_adam": "#ee6a50",
    "comp_ams": "#a8799f",
    "signsgd_ef": "#882255",
    "topk_ef": "#8f8f2d",
    "gqsgd_diloco": "#0b3c8c",
    "gqsgd_fedpaq": "#6a994e",
    "gqsgd_genqsgd": "#386641",
    "gqsgd_sparseloco": "#bc6c25",
    "gqsgd_muloco": "#f4a259",
    "gqsgd_chb": "#9d4edd",
    "gqsgd_neolithic": "#a4161a",
    "gqsgd_mcm": "#1d7874",
    "gqsgd_predictive": "#ee964b",
    "gqsgd_elastic": "#00798c",
}
#: Colours of variants that are named otherwise.
OTHERS = ("#e69f00", "#7b3294", "#8c564b", "#1b7837", "#999933", "#882255")

#: Resolution of pictures in dots per inch.
DPI = 150

#: Matplotlib's settings.
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "svg.hashsalt": "gqsgd",
}


def colours(variants: Sequence[str]) -> dict[str, str]:
    """A colour for each variant: that of its strategy, or the next of the other colours."""
    taken = {COLOURS.get(variant) for variant in variants}
    others = itertools.cycle([colour for colour in OTHERS if colour not in taken] or OTHERS)
    return {variant: COLOURS.get(variant) or next(others) for variant in variants}


@contextmanager
def drawn(file: Path, *, crop: str | None = None, **options: Any) -> Iterator[Figure]:
    """Yields a figure in this style, which is written to a file once it is drawn.

    Args:
        file: of the picture.
        crop: Matplotlib's ``bbox_inches``; "tight": the picture is as large as what is drawn.
        options: of the figure, e.g. its ``figsize``.
    """
    import matplotlib as mpl  # takes a second, and only a picture needs it
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(dpi=DPI, **options)
        yield figure
        figure.savefig(file, bbox_inches=crop, metadata={"Software": None})
