"""Pictures of predictions; they need matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from lightning_gqsgd.errors import ConfigError, import_optional
from lightning_gqsgd.predict.advice import Candidate, Cluster, break_even
from lightning_gqsgd.predict.files import check_writable
from lightning_gqsgd.predict.model import LINKS, Prediction
from lightning_gqsgd.spec.quantities import rate_in_words

_DPI = 150
_GREY = "#4d4d4d"
#: Colours by width of codes; Okabe and Ito's, distinguishable with colour blindness.
_COLOURS = {
    "fp32": _GREY,
    "native": _GREY,
    "bf16": "#56b4e9",
    "8": "#d55e00",
    "4": "#009e73",
    "3": "#cc79a7",
    "2": "#e69f00",
}
#: Colours of a Gantt picture, by kind of task.
_DOES = {"forward": "#bbbbbb", "backward": "#888888", "optimizer": "#bbbbbb", "codec": "#d55e00", "link": "#0072b2"}


def check_files(files: Mapping[str, Path]) -> None:
    """Check that pictures can be written to files, before the data for them are computed.

    Args:
        files: the files, by the options that name them, for errors.

    Raises:
        ConfigError: if matplotlib is not installed, if a suffix is not that of a picture, if a file cannot be written,
            or if two pictures have the same file.
    """
    _pyplot()
    from matplotlib.backend_bases import FigureCanvasBase

    for option, file in files.items():
        if file.suffix.lstrip(".").lower() not in FigureCanvasBase.get_supported_filetypes():
            raise ConfigError(f"{file} has no suffix of a picture; end its name in .png, .pdf or .svg")
        check_writable(option, file)
    if len({file.resolve() for file in files.values()}) < len(files):
        raise ConfigError(f"{' and '.join(files)} name one file, {next(iter(files.values()))}; name two files")


def draw_sweeps(
    cluster: Cluster, nodes: dict[int, list[Candidate]], rates: dict[float, list[Candidate]], file: Path
) -> None:
    """Draw the scaling efficiency over nodes, and the duration of a step over the rate of links; ``nodes`` and
    ``rates`` are the results of `advice.over_nodes` and `advice.over_rates`.

    Raises:
        ConfigError: if matplotlib is not installed, or if the file cannot be written.
    """
    plt = _pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.6), layout="constrained")
    for name, first in {candidate.name: candidate for choices in nodes.values() for candidate in choices}.items():
        style = {"color": _colour(first), "ls": _line_style(name), "lw": 1.4}
        points = {
            count: candidate.prediction.efficiency
            for count, choices in nodes.items()
            for candidate in choices
            if candidate.name == name
        }
        left.plot(list(points), list(points.values()), label=name, **style)
        steps = {
            _rate(cluster, factor): 1e3 * candidate.prediction.step_s
            for factor, choices in rates.items()
            for candidate in choices
            if candidate.name == name
        }
        right.plot(list(steps), list(steps.values()), **style)
    left.set(xlabel="nodes", ylabel="scaling efficiency", ylim=(0, 1.02))
    left.set_xscale("log", base=2)
    left.xaxis.set_major_formatter("{x:g}")
    _mark(left, cluster.nodes, "this cluster", color=_GREY, lw=0.8, ls=":")
    left.set_title("Step without communication / step", loc="left", fontsize=10)
    figure.legend(loc="outside lower center", ncols=4, fontsize=7, frameon=False)
    unit = "times that measured" if cluster.link is None else "Gbit/s"
    right.set(xscale="log", yscale="log", xlabel=f"rate of the links ({unit})", ylabel="step (ms)")
    _write_numbers(right)
    _mark(right, _rate(cluster, 1.0), "this cluster", color=_GREY, lw=0.8, ls=":")
    limit = break_even(rates)
    if limit is not None:
        label = "break-even" if cluster.link is None else f"break-even: {rate_in_words(cluster.link * limit)}"
        _mark(right, _rate(cluster, limit), label, color="#b2182b", lw=1.0)
    right.set_title(f"{cluster.nodes} × {cluster.per_node} ranks", loc="left", fontsize=10)
    _save(figure, file, plt)


def _mark(axes: Any, place: float, label: str, **line: Any) -> None:
    """Draw a vertical line, with a label along its upper end."""
    axes.axvline(place, **line)
    axes.annotate(
        label,
        (place, 0.97),
        xycoords=("data", "axes fraction"),
        xytext=(-2, 0),
        textcoords="offset points",
        fontsize=8,
        rotation=90,
        ha="right",
        va="top",
        color=line["color"],
    )


def _write_numbers(axes: Any) -> None:
    """Write numbers, and not powers of ten, at the ticks of two logarithmic axes, whatever their range is."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        steps = (1.0, 2.0, 5.0) if high < 300 * low else (1.0,)
        axis.set_major_locator(MaxNLocator(6) if high < 5 * low else LogLocator(10, steps))
        axis.set_major_formatter("{x:,g}")
        axis.set_minor_formatter(NullFormatter())


def draw_steps(predictions: Mapping[str, Prediction], file: Path | IO[bytes], width: float = 9.6) -> None:
    """Draw the tasks of each resource in a step, one group of rows for each prediction, on one time axis.

    Args:
        predictions: the predictions, by name.
        file: a path, or an open file, to which an SVG is written.
        width: width of the picture, in inches.

    Raises:
        ConfigError: if matplotlib is not installed, or if the file cannot be written.
    """
    plt = _pyplot()
    resources = [sorted({event.resource for event in made.events}) for made in predictions.values()]
    heights = [max(2, len(names)) for names in resources]
    figure, several = plt.subplots(
        len(predictions),
        1,
        figsize=(width, 0.5 + 0.38 * sum(heights) + 0.35 * len(predictions)),
        layout="constrained",
        sharex=True,
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
    )
    for axes, (name, made), names in zip(several[:, 0], predictions.items(), resources, strict=True):
        for event in made.events:
            colour = _DOES.get(event.label, _DOES["link" if event.resource in LINKS else "codec"])
            place = names[::-1].index(event.resource)
            length = 1e3 * (event.end_s - event.start_s)
            light = 0.55 if event.bucket % 2 else 1.0
            axes.barh(place, length, left=1e3 * event.start_s, color=colour, alpha=light, height=0.72, lw=0)
        axes.set_yticks(range(len(names)), names[::-1], fontsize=8)
        axes.grid(visible=False, axis="y")
        axes.axvline(1e3 * made.step_s, color="#b2182b", lw=0.9)
        axes.set_title(f"{name}: {1e3 * made.step_s:.0f} ms", loc="left", fontsize=9)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    several[-1, 0].set_xlabel("ms from the start of the step (shades: buckets in turns)")
    _save(figure, file, plt)


def _colour(candidate: Candidate) -> str:
    """Returns the colour of a candidate: that of the bits of its gradients, or of their dtype."""
    bits = candidate.num_bits
    return _COLOURS[candidate.name.split(", ")[-1] if bits is None else str(bits)]


def _line_style(name: str) -> str:
    """Returns the line of a candidate: dashed with two levels or replicas, dotted with compressed weights."""
    if name.startswith("weights"):
        return ":"
    return "--" if "hierarchical" in name or name.startswith("replicas") else "-"


def _rate(cluster: Cluster, factor: float) -> float:
    """Returns a factor's value on the horizontal axis: Gbit/s, or the factor itself if the link was measured."""
    return factor if cluster.link is None else 8e-9 * cluster.link * factor


def _pyplot() -> Any:
    import_optional("matplotlib", "matplotlib", "a picture", "leave out --plot and --gantt").use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, file: Path | IO[bytes], plt: Any) -> None:
    if not isinstance(file, Path):
        figure.savefig(file, format="svg", metadata={"Date": None})  # the same prediction gives the same file
        plt.close(figure)
        return
    try:
        figure.savefig(file, dpi=_DPI)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written ({error.strerror}); name a file in a folder that exists") from None
    finally:
        plt.close(figure)
