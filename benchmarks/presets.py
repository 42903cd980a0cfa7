"""Relative L2 error of one averaged gradient, for every preset, on synthetic and on real gradients.

    python -m benchmarks.presets --save --docs docs/presets.md

The synthetic gradients are those of `benchmarks.accuracy`: Gaussian, heavy-tailed with 64 layers, and sparse. The real
gradients are those of two networks, at initialisation and after training: a ResNet-20 on 32x32 images (CIFAR-10 from
the folder GQSGD_DATA; without that folder, scikit-learn's digits), and a decoder of two layers on bytes of Python's
help texts. Every rank has its own batch at the same weights.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MultipleLocator, NullFormatter
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import accuracy
from benchmarks.gradient_sequences import images, segments_of
from benchmarks.report import RESULTS, Report, command_line, present
from lightning_gqsgd.cli.facts import COLUMNS, facts_at, problems
from lightning_gqsgd.cli.listing import LOCAL_STEPS, OTHER_SYSTEMS, Listing
from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.presets import FIXED, LOCAL_PRESETS, PRESETS, LocalPreset, Preset, make_config
from lightning_gqsgd.reducers.memory import StabilityWarning
from lightning_gqsgd.research.simulation import VirtualRanks, relative_error
from lightning_gqsgd.research.systems import SYSTEMS, System
from lightning_gqsgd.research.theory import bits_at
from pictures.style import COLOURS, drawn
from workloads.resnet import ResNet

COMMAND = "python -m benchmarks.presets --save --docs docs/presets.md"
#: Number of steps on the same gradients over which presets with a memory are averaged, and the most ranks for which
#: this is done.
REPEATS, REPEATED_RANKS = 16, 8
DOCS_RANKS = 8
#: The page of errors, beside that of presets.
ERRORS = "preset_errors.md"


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        name: name in tables.
        preset: name of the preset.
        fields: fields that differ from those of the preset.
        family: the figure connects cases of one family, which differ in their bits.
    """

    name: str
    preset: str
    fields: dict[str, Any] = field(default_factory=dict)
    family: str = ""

    @property
    def remembers(self) -> bool:
        """Whether the configuration has a memory."""
        return make_config(self.preset, **self.fields).remembers


#: Further numbers of bits of a preset. Exponential codes get mantissa bits that leave their exponents a useful range.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "gqsgd": [{"bits": 6}, {"bits": 2, "codec": "companded"}],
    "gqsgd_2bit": [{"bits": 4}, {"bits": 3}, {"bits": 1}],
    "qsgd": [{"bits": 8}, {"bits": 6}, {"bits": 2}],
    "gqsgd_exponential": [{"bits": 6, "mantissa": 2}, {"bits": 4, "mantissa": 1}, {"bits": 2, "mantissa": 0}],
    "natural_compression": [{"bits": 6}, {"bits": 4}, {"bits": 2}],
    "dq_psgd": [{"bits": 8}, {"bits": 6}, {"bits": 2}],
}


def cases() -> list[Case]:
    """All presets with one configuration for all steps, each followed by its variants."""
    listed = []
    for preset in FIXED:
        family = "gqsgd" if preset in ("gqsgd_4bit", "gqsgd_3bit") else preset if preset in VARIANTS else ""
        listed.append(Case(preset, preset, {}, family))
        for fields in VARIANTS.get(preset, ()):
            codec = f", {fields['codec']}" if "codec" in fields else ""
            listed.append(Case(f"{preset} {fields['bits']} bit{codec}", preset, fields, family))
    return listed


@dataclass(frozen=True)
class Gradients:
    """One flat gradient per rank, and the parameters inside it."""

    ranks: list[Tensor]
    segments: list[Segment]


def percent_error(gradients: Gradients, config: GQSGDConfig) -> float:
    """The relative L2 error of one mean of all gradients, in per cent."""
    virtual = VirtualRanks(len(gradients.ranks), gradients.segments, torch.float32, config)
    return 100 * relative_error(virtual.mean(gradients.ranks, 0), gradients.ranks)


def synthetic(kind: str, ranks: int) -> Gradients:
    """A kind of `benchmarks.accuracy`; each layer of the heavy-tailed kind is a parameter."""
    gradients = accuracy.KINDS[kind](ranks, torch.Generator().manual_seed(ranks))
    parts = accuracy.LAYERS if kind == "heavy-tailed" else 1
    numel = gradients[0].numel() // parts
    return Gradients(gradients, [Segment(number, numel, raw=False) for number in range(parts)])


Batch = Callable[[int, torch.Generator], Tensor]


class Decoder(nn.Module):
    """A language model on bytes, with two layers and learnt positions."""

    def __init__(self) -> None:
        super().__init__()
        width, context = 128, 32
        self.mask: Tensor
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (N, length, 256) of bytes (N, length)."""
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.places.weight[:length]
        logits: Tensor = self.head(self.layers(x, mask=self.mask[:length, :length], is_causal=True))
        return logits


def resnet() -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """A ResNet-20, its SGD, and a function that gives its loss on random images."""
    model = ResNet(blocks=[3, 3, 3], width=16)
    _, pixels, labels = images(32)

    def loss(size: int, generator: torch.Generator) -> Tensor:
        chosen = torch.randint(len(labels), (size,), generator=generator)
        return F.cross_entropy(model(pixels[chosen].float() / 64 - 2), labels[chosen])

    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4), loss


def transformer() -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """The decoder, its Adam, and a function that gives its loss on random places of the text."""
    model, text = Decoder(), _text()
    context = model.places.num_embeddings

    def loss(size: int, generator: torch.Generator) -> Tensor:
        starts = torch.randint(len(text) - context, (size,), generator=generator)
        chosen = text[starts[:, None] + torch.arange(context + 1)]
        return F.cross_entropy(model(chosen[:, :-1]).flatten(0, 1), chosen[:, 1:].flatten())

    return model, torch.optim.Adam(model.parameters(), lr=1e-3), loss


def trained(make: Callable[[], tuple[nn.Module, torch.optim.Optimizer, Batch]], steps: int, ranks: int) -> Gradients:
    """Gradients of ``ranks`` batches of 16 images or texts, after ``steps`` steps on batches of 32."""
    torch.manual_seed(0)
    model, optimizer, loss = make()
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(32, generator).backward()
        optimizer.step()
    parameters = list(model.parameters())
    gradients = [torch.autograd.grad(loss(16, generator), parameters) for _ in range(ranks)]
    flat = [torch.cat([tensor.flatten() for tensor in grads]) for grads in gradients]
    return Gradients(flat, segments_of(model))


@cache
def _text() -> Tensor:
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()


#: Steps of training before gradients of trained models are taken.
STEPS = 300
#: Gradients of so many ranks, by kind.
KINDS: dict[str, Callable[[int], Gradients]] = {
    **{kind: partial(synthetic, kind) for kind in ("gaussian", "heavy-tailed", "sparse")},
    "CNN new": partial(trained, resnet, 0),
    "CNN trained": partial(trained, resnet, STEPS),
    "LM new": partial(trained, transformer, 0),
    "LM trained": partial(trained, transformer, STEPS),
}


def errors(case: Case, gradients: Sequence[Tensor], segments: Sequence[Segment]) -> Iterator[tuple[int, float, float]]:
    """Triples (steps, relative error, bits per coordinate).

    The first triple is that of one step. Presets with a memory have a second triple: the error of the mean of `REPEATS`
    steps. A preset that cannot work with so many ranks has no triple.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StabilityWarning)
        try:
            ranks = VirtualRanks(len(gradients), segments, gradients[0].dtype, case.preset, **case.fields)
        except ConfigError:
            return  # too many ranks for the preset; the table shows a dash
    total = ranks.mean(gradients, 0).double()
    yield 1, relative_error(total, gradients), ranks.wire_bits
    if case.remembers and len(gradients) <= REPEATED_RANKS:
        for step in range(1, REPEATS):
            total += ranks.mean(gradients, step)
        yield REPEATS, relative_error(total / REPEATS, gradients), ranks.wire_bits


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One dictionary for each preset, number of ranks, kind of gradients and number of steps."""
    facts = []
    for kind in (kind for kind in KINDS if kind in options.kinds):
        data = KINDS[kind](max(options.ranks))
        chosen = [case for case in cases() if not options.only or case.preset in options.only]
        work = [(ranks, case) for ranks in options.ranks for case in chosen]
        for ranks, case in track(work, kind, console=Console(stderr=True), transient=True):
            for steps, error, bits in errors(case, data.ranks[:ranks], data.segments):
                keys = {"case": case.name, "ranks": ranks, "kind": kind, "steps": steps}
                numbers = {"error": error, "bits": bits, "bound_error": 2.0**-bits, "bound_bits": bits_at(error)}
                facts.append({**keys, **{name: float(f"{value:.5g}") for name, value in numbers.items()}})
    return facts


def measure(options: argparse.Namespace) -> Report:
    """The table; with ``--docs``, the documentation is written as well."""
    if options.from_results and options.save:
        raise SystemExit("--from-results measures nothing that --save could write; leave one out")
    is_written = options.save or options.docs
    if options.from_results:
        raw = json.loads((RESULTS / "presets.json").read_text())
    else:
        facts = measured(options)
        if is_written and options.only:  # the others stay as they were measured before
            kept = json.loads((RESULTS / "presets.json").read_text())["facts"]
            facts = [fact for fact in kept if fact["case"].split()[0] not in options.only] + facts
        raw = {"facts": facts, "images": images(32)[0]}
    order = [kind for kind in KINDS if any(fact["kind"] == kind for fact in raw["facts"])]
    ranks = sorted({fact["ranks"] for fact in raw["facts"]})
    report = Report(
        "presets",
        "Relative L2 error (%) of an averaged gradient, by preset",
        {"preset": "", "n": "d", "steps": "d", "bits": "", "bound": ""} | dict.fromkeys(order, ""),
        notes=how_to_read(raw) if options.save else (),
        raw=raw,
    )
    for n in ranks:
        rows = [[row[0], n, *row[1:]] for row in table(raw["facts"], n, order, (1, REPEATS))]
        report.rows += rows if is_written else [row for row in rows if row[0].split()[0] in (options.only or FIXED)]
    if options.docs:
        write_docs(Path(options.docs), raw, order, ranks)
    return report


def table(facts: list[dict[str, Any]], ranks: int, order: Sequence[str], steps: Sequence[int]) -> list[list[Any]]:
    """Rows: preset, steps, bits, the bound's error and the errors, in percent."""
    rows: list[list[Any]] = []
    for case in cases():
        for count in steps:
            by_kind = {
                fact["kind"]: fact
                for fact in facts
                if (fact["case"], fact["ranks"], fact["steps"]) == (case.name, ranks, count)
            }
            if not by_kind and (count > 1 or not any(fact["ranks"] == ranks for fact in facts)):
                continue
            first = by_kind.get(order[0])
            bits = f"{first['bits']:.2f}" if first else None
            bound = percent(first["bound_error"]) if first and count == 1 else None
            cells = [percent(by_kind[kind]["error"]) if kind in by_kind else None for kind in order]
            rows.append([case.name, count, bits, bound, *cells])
    return rows


def percent(ratio: float) -> str:
    """A ratio in percent, with three digits."""
    value = 100 * ratio
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def how_to_read(raw: dict[str, Any]) -> list[str]:
    """Paragraphs under the tables."""
    elias = [fact["bits"] for fact in raw["facts"] if PRESETS[fact["case"].split()[0]].config.coder == "elias"]
    return [
        "Gradients: independent and normal (gaussian); Student's t with 3 degrees of freedom in 64 layers whose scales "
        "span three decades, correlated 0.1 between ranks (heavy-tailed); 90 % zeros, mostly at the same places "
        f"(sparse); a ResNet-20 on {raw['images']} (CNN; GQSGD_DATA says where CIFAR-10 is, otherwise digits) "
        "and a decoder of two layers on the bytes of Python's help "
        f"texts (LM), both new and after {STEPS} steps, 16 samples per rank. All rows use the same gradients; n "
        "ranks use the first n of them.",
        "bits: bits per coordinate of one rank's message, including scales, for the first column of gradients. The "
        f"length of Elias codes depends on the gradients, {min(elias):.2f} to {max(elias):.2f} bits here. For the "
        "models, bits are more, for two reasons: parameters below 1,024 elements are sent uncompressed, and all shards "
        "are as long as the longest one, which wastes bits if many ranks share so few coordinates"
        f"{_most_added(raw['facts'])}. A gather sends n - 1 messages, the other collectives about two.",
        "bound: 2^-bits, the least error of any method on independent normal gradients. It holds in the column "
        "gaussian; gradients that are similar on all ranks, uneven in size or zero need fewer bits. An error above "
        "100 % is worse than no gradient at all, but without bias it averages out over steps.",
        "Presets with a memory: one step is their first step, with an empty memory. So its error is that of the codec, "
        f"and not the error in a training. The mean of {REPEATS} steps on the same gradients (up to {REPEATED_RANKS} "
        "ranks) has the error that is left when the memory works; roundings without bias and without memory would "
        "leave a quarter. Constant gradients favour wyner_ziv; on gradients of trainings it gains and loses, see "
        "docs/choosing_figures.md, Memory.",
    ]


def _most_added(facts: list[dict[str, Any]]) -> str:
    """The largest difference of bits between columns among codes of fixed length, and where it is."""
    fixed = [fact for fact in facts if PRESETS[fact["case"].split()[0]].config.coder == "fixed"]
    first = {(fact["case"], fact["ranks"]): fact["bits"] for fact in fixed if fact["kind"] == facts[0]["kind"]}
    most = max(fixed, key=lambda fact: fact["bits"] - first[fact["case"], fact["ranks"]])
    added = most["bits"] - first[most["case"], most["ranks"]]
    return f" (by up to {added:.1f}: {most['case']}, n = {most['ranks']}, {most['kind']})" if added > 0.5 else ""


def write_docs(path: Path, raw: dict[str, Any], order: Sequence[str], ranks: Sequence[int]) -> None:
    """Write the page of presets at ``path``, and beside it the page of their errors and the figure."""
    described = [facts_at(name, DOCS_RANKS) for name in PRESETS]
    lines = [
        "# Presets",
        "",
        "This page shows what each preset sends, remembers and guarantees. A preset is a named configuration, usually "
        f"a system of the literature. [Errors by preset]({ERRORS}) shows the error of an averaged gradient under each "
        "preset. This page is written by",
        "",
        f"    {COMMAND}",
        "",
        "## Columns and symbols",
        "",
        *_markdown(("column", "meaning"), list(COLUMNS.items()), numbers=()),
        "",
        f"## At {DOCS_RANKS} ranks",
        "",
        "`gqsgd presets --ranks N` prints this table for any number of ranks. `gqsgd presets NAME` prints all fields "
        "of a preset.",
        "",
        *_markdown(tuple(COLUMNS), [preset_facts.row() for preset_facts in described], numbers=(1, 2, 4)),
        "",
        *_spaced(problems(described)),
        *_section(
            LOCAL_STEPS,
            "With these presets, each rank trains on its own, and models are averaged every H steps; "
            "[Local steps](local_steps.md) has formulas and experiments.",
        ),
        *_section(
            OTHER_SYSTEMS,
            "These systems need more than a configuration; [Optimizers, rules of training, topologies](systems.md) has "
            "formulas and experiments.",
        ),
        *left_out(),
    ]
    errors_page, picture = path.with_name(ERRORS), path.with_suffix(".png")
    for page, content in ((path, lines), (errors_page, _lines_of_errors(raw, order, ranks, picture))):
        page.write_text("\n".join(content).rstrip() + "\n")
    print(f"written: {path}, {errors_page} and {picture}")


def _section(listing: Listing, about: str) -> list[str]:
    """The lines of the section with a further table of ``gqsgd presets``; ``about`` introduces it."""
    note = listing.note.replace("gqsgd presets NAME", "`gqsgd presets NAME`")
    rows = [listing.row(name) for name in listing.names]
    return [f"## {listing.title}", "", about, "", note, "", *_markdown(listing.headings, rows, numbers=()), ""]


def left_out() -> list[str]:
    """The lines of the section on what of the papers is left out."""
    everything: dict[str, Preset | LocalPreset | System] = {**PRESETS, **LOCAL_PRESETS, **SYSTEMS}
    told = {name: entry.left_out for name, entry in everything.items() if entry.left_out}
    return [
        "## What is left out",
        "",
        "This table lists parts of the systems' papers that are not implemented, and the reasons. "
        "`gqsgd systems check NAME` runs the smallest experiment of a system, and prints claims beside measurements.",
        "",
        *_markdown(("system", "left out, and why"), list(told.items()), numbers=()),
        "",
    ]


def _lines_of_errors(raw: dict[str, Any], order: Sequence[str], ranks: Sequence[int], picture: Path) -> list[str]:
    """The lines of the page of errors, whose figure is drawn."""
    shown = DOCS_RANKS if DOCS_RANKS in ranks else ranks[0]
    save_figure(raw["facts"], order, shown, picture)
    lines = [
        "# Errors by preset",
        "",
        "This page shows the error of an averaged gradient under each [preset](presets.md). It is written by",
        "",
        f"    {COMMAND}",
        "",
        "## Relative L2 error of one step",
        "",
        "The error is |estimate - mean|/|mean| in percent. Compare an error with the bound of its row, and with the "
        "errors of presets that have about the same number of bits.",
        "",
        f"![relative error against bits]({picture.name})",
        "",
        f"*n = {shown}. No method can reach the grey area on independent normal gradients.*",
        "",
    ]
    lines += _spaced(how_to_read(raw))
    for n in ranks:
        rows = [[row[0], *row[2:]] for row in table(raw["facts"], n, order, (1,))]
        headings = ("preset", "bits", "bound", *order)
        lines += [f"### n = {n}", "", *_markdown(headings, rows, numbers=range(1, len(headings))), ""]
    for n in ranks:
        rows = [[row[0], row[2], *row[4:]] for row in table(raw["facts"], n, order, (REPEATS,))]
        headings = ("preset", "bits per step", *order)
        if rows:
            lines += [f"### n = {n}, mean of {REPEATS} steps on the same gradients", ""]
            lines += [*_markdown(headings, rows, numbers=range(1, len(headings))), ""]
    return lines


def _spaced(paragraphs: Sequence[str]) -> list[str]:
    return [line for paragraph in paragraphs for line in (paragraph, "")]


def _markdown(headings: Sequence[str], rows: Sequence[Sequence[Any]], numbers: Sequence[int]) -> list[str]:
    rules = ["---:" if column in numbers else "---" for column in range(len(headings))]
    body = [["–" if cell is None else str(cell) for cell in row] for row in rows]
    return ["| " + " | ".join(row) + " |" for row in (headings, rules, *body)]


def save_figure(facts: list[dict[str, Any]], order: Sequence[str], ranks: int, file: Path) -> None:
    """Draw the error of the first step against bits: a panel for each kind of gradients, and one for the legend."""
    columns = min(4, len(order) + 1)
    rows = math.ceil((len(order) + 1) / columns)
    chosen = [fact for fact in facts if fact["ranks"] == ranks and fact["steps"] == 1]
    looks = _looks(chosen)
    with drawn(file, figsize=(3.1 * columns, 3.0 * rows), layout="constrained") as figure:
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        low = 0.5 * min(fact["error"] for fact in chosen)
        high = 1.5 * max(fact["error"] for fact in chosen)
        most = 0.6 + max(fact["bits"] for fact in chosen)
        for number, kind in enumerate(order):
            axes = grid.flat[number]
            axes.set_yscale("log")
            axes.set(xlim=(0, most), ylim=(low, high))
            axes.set_title(kind)
            _draw_panel(axes, [fact for fact in chosen if fact["kind"] == kind], looks)
            axes.label_outer()
            if number + columns >= len(order):
                axes.tick_params(labelbottom=True)
        for axes in grid.flat[len(order) :]:
            axes.set_axis_off()
        _draw_legend(grid.flat[len(order)], looks)
        figure.supxlabel("bits per coordinate of one rank's message", fontsize=9, color="#333333")
        figure.supylabel(f"relative L2 error of one averaged gradient, n = {ranks}", fontsize=9, color="#333333")


def _looks(facts: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Label, line, colour and marker of each family, or of each preset without a family.

    Entries with equal points share their looks.
    """
    looks: dict[str, dict[str, Any]] = {}
    owners: dict[tuple[tuple[str, float, float], ...], str] = {}
    for case in cases():
        name = case.family or case.name
        points = tuple((fact["kind"], fact["bits"], fact["error"]) for fact in facts if fact["case"] == case.name)
        if name in looks or not points:
            continue
        if points in owners:
            looks[owners[points]]["label"] += f" = {name}"
            continue
        owners[points] = name
        shape = {"ls": "-", "lw": 1.3, "marker": "o", "ms": 4.5} if case.family else {"ls": "", "ms": 5.5}
        shape.setdefault("marker", "D" if case.remembers else "s")
        looks[name] = {**shape, "color": COLOURS.get(name, "#333333"), "mec": "white", "mew": 0.6, "label": name}
    return looks


def _draw_panel(axes: Axes, facts: list[dict[str, Any]], looks: dict[str, dict[str, Any]]) -> None:
    bits = np.array([0.0, 10.0])
    axes.fill_between(bits, 1e-9, 2.0**-bits, color="#f0f0f3", lw=0, zorder=0)
    axes.plot(bits, 2.0**-bits, color="#777777", lw=1.0, zorder=1)
    axes.axhline(1.0, color="#bbbbbb", lw=0.7, ls=(0, (4, 3)), zorder=1)
    points: dict[str, list[tuple[float, float]]] = {}
    for case in cases():
        points.setdefault(case.family or case.name, []).extend(
            (fact["bits"], fact["error"]) for fact in facts if fact["case"] == case.name
        )
    for name, places in points.items():
        if places and name in looks:
            axes.plot(*zip(*sorted(places), strict=True), zorder=2 if looks[name]["ls"] else 3, **looks[name])
    axes.xaxis.set_major_locator(MultipleLocator(2))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_legend(axes: Axes, looks: dict[str, dict[str, Any]]) -> None:
    grey: dict[str, Any] = {"color": "#888888", "ls": "", "mec": "white"}
    left = [Line2D([], [], **look) for look in looks.values() if look["ls"]]
    left += [
        Line2D([], [], color="#777777", lw=1.0, label="bound 2$^{-bits}$"),
        Line2D([], [], marker="s", label="no memory", **grey),
        Line2D([], [], marker="D", ms=5.5, label="memory, first step", **grey),
    ]
    right = [Line2D([], [], **look) for look in looks.values() if not look["ls"]]
    left += [Line2D([], [], ls="", label=" ") for _ in range(len(right) - len(left))]
    legend = axes.legend(
        handles=[*left, *right],
        loc="center",
        fontsize=7.2,
        ncols=2,
        columnspacing=0.8,
        handlelength=1.6,
        handletextpad=0.5,
        labelspacing=0.6,
        borderpad=0,
    )
    legend.set_in_layout(False)  # a longer entry would widen its column


def main() -> None:
    """Run the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64], help="e.g. 2 4 8 16 32 64")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="of gradients")
    parser.add_argument(
        "--docs", metavar="FILE", help="write this Markdown page, and beside it that of errors and a figure"
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(FIXED), metavar="PRESET", help="measure these anew, and keep the others"
    )
    parser.add_argument(
        "--from-results", action="store_true", help="take benchmarks/results/presets.json; measure nothing"
    )
    present(parser, measure, threads=1)  # the models are so small that more threads are not faster


if __name__ == "__main__":
    main()
