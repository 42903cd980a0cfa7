"""The command line: ``gqsgd presets`` says what each preset sends, remembers and guarantees.

gqsgd presets --ranks 8
gqsgd presets diana --json
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table

from lightning_gqsgd.codecs import codec_of
from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.layout import Segment
from lightning_gqsgd.memory import StabilityWarning, kinds
from lightning_gqsgd.plan import Plan
from lightning_gqsgd.presets import PRESETS, Preset, make_config
from lightning_gqsgd.reducers import Setting, resolve
from lightning_gqsgd.reducers.base import ring_bytes
from lightning_gqsgd.simulate import VirtualRanks

#: Size of the parameter whose messages are counted, where their length is known without a step.
NUMEL = 1 << 20
#: Coordinates of all ranks together, and at least of each, where it takes a step.
STEP_NUMEL, LEAST_STEP_NUMEL = 1 << 20, 1 << 12
#: Columns when nobody's terminal sets a limit.
PIPED_WIDTH = 200

HEADINGS = (
    "preset",
    "bits",
    "sent / fp32",
    "collective",
    "state",
    "bias",
    "ω or δ",
    "scale shared by",
    "paper",
)
#: What a narrow terminal goes without, in this order.
_DISPENSABLE = ("paper", "scale shared by", "bias", "state")

NOTES = (
    "bits: of one rank's message, per coordinate, scales included (Elias codes: of Gaussian gradients). sent / fp32: "
    "bytes that a rank sends, over those of an fp32 ring allreduce.",
    "state: numbers that a rank remembers, per coordinate; what only the owner of a shard remembers counts 1/n.",
    "ω: E|Q(x) - x|² <= ω |x|² of what shares a scale (under a scale of all ranks: their n blocks); "
    "δ: |C(x) - x|² <= (1 - δ) |x|² of a biased codec. Worst cases, which typical gradients stay below.",
)

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@dataclass(frozen=True)
class Facts:
    """What a preset does at a number of ranks. Without ``config``, nothing: ``problem`` says why.

    Attributes:
        name: of the preset.
        preset: the preset.
        ranks: number of ranks.
        config: with the reducer chosen and the numbers of its memories.
        problem: why it cannot work.
        warnings: on the stability of its memories.
        wire_bits: bits of one rank's message per coordinate, scales included.
        sent_ratio: bytes that a rank sends, over those of an fp32 ring allreduce.
        state: numbers remembered per coordinate, by kind.
        omega: ω of the coordinates that share a scale; None where it does not apply.
        delta: δ of a biased codec's block.
    """

    name: str
    preset: Preset
    ranks: int
    config: GQSGDConfig | None = None
    problem: str = ""
    warnings: tuple[str, ...] = ()
    wire_bits: float | None = None
    sent_ratio: float | None = None
    state: dict[str, float] = dataclasses.field(default_factory=dict)
    omega: float | None = None
    delta: float | None = None

    @property
    def bias(self) -> str:
        """Whether one message's mean is its input."""
        config = self.config or self.preset.config
        if config.biased:
            return "biased, memory corrects" if config.up is not None else "biased"
        return "clipped" if config.clip else "unbiased"

    @property
    def sharing(self) -> str:
        """What shares a scale."""
        if self.config is None:
            return "–"
        if self.config.codec == "top_k":
            return f"none ({self.config.block_size})"
        block = f"{self.config.block_size}" if self.config.scale_per == "block" else "parameter"
        return f"{self.ranks} × {block}" if _shares(self.config) else block

    @property
    def constant(self) -> str:
        """ω or δ, as text."""
        if self.omega is not None:
            return f"ω = {self.omega:.3g}"
        return "–" if self.delta is None else f"δ = {self.delta:.3g}"

    def row(self) -> list[str]:
        """Cells under `HEADINGS`."""
        if self.config is None:
            return [self.name, "–", "–", f"not at n = {self.ranks}", "–", self.bias, "–", "–", self.preset.paper]
        return [
            self.name,
            f"{self.wire_bits:.2f}",
            f"{self.sent_ratio:.3f}",
            self.config.reducer,
            f"{sum(self.state.values()):.4g}",
            self.bias,
            self.constant,
            self.sharing,
            self.preset.paper,
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values only."""
        return {
            "name": self.name,
            "ranks": self.ranks,
            "works": self.config is not None,
            "problem": self.problem or None,
            "wire_bits": self.wire_bits,
            "sent_vs_fp32_ring": self.sent_ratio,
            "collective": self.config and self.config.reducer,
            "state": self.state,
            "state_per_coordinate": sum(self.state.values()),
            "bias": self.bias,
            "omega": self.omega,
            "delta": self.delta,
            "block_size": (self.config or self.preset.config).block_size,
            "scale_shared_by": self.sharing,
            "paper": self.preset.paper,
            "what": self.preset.what,
            "optimizer": self.preset.optimizer,
            "warnings": list(self.warnings),
            "config": (self.config or self.preset.config).to_dict(),
        }


def facts_of(name: str, ranks: int, block_size: int | None = None) -> Facts:
    """What a preset does at ``ranks``, with another block size if one is given.

    Raises:
        ConfigError: an unknown preset.
    """
    preset = _known(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StabilityWarning)
        try:
            fields = {} if block_size is None else {"block_size": block_size}
            config = resolve(make_config(name, **fields), ranks)
            bits, sent = _traffic(config, ranks)
        except ConfigError as error:
            return Facts(name, preset, ranks, problem=str(error))
    said = tuple(dict.fromkeys(str(one.message) for one in caught if issubclass(one.category, StabilityWarning)))
    delta = codec_of(config).delta(config.block_size) if config.biased else None
    state = _state(config, ranks)
    return Facts(name, preset, ranks, config, "", said, bits, sent, state, _omega(config, ranks), delta)


def _known(name: str) -> Preset:
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.4)
    hint = f"; did you mean one of {', '.join(map(repr, near))}?" if near else ""
    raise ConfigError(f"unknown preset {name!r}{hint} (presets: {', '.join(PRESETS)})")


def _traffic(config: GQSGDConfig, ranks: int) -> tuple[float, float]:
    """Bits of a message per coordinate, and bytes sent over those of an fp32 ring allreduce."""
    if config.coder == "fixed":
        plan = Plan([Segment(0, NUMEL, raw=False)], Setting(config, ranks, torch.float32))
        return 8 * plan.message_bytes / NUMEL, plan.sent_bytes / ring_bytes(4 * NUMEL, ranks)
    numel = max(LEAST_STEP_NUMEL, STEP_NUMEL // ranks)
    virtual = VirtualRanks(ranks, [Segment(0, numel, raw=False)], **config.to_dict())
    generator = torch.Generator().manual_seed(0)
    virtual.mean([torch.randn(numel, generator=generator) for _ in range(ranks)], step=0)
    return virtual.wire_bits, virtual.bytes_sent / ring_bytes(4 * numel, ranks)


def _state(config: GQSGDConfig, ranks: int) -> dict[str, float]:
    """Numbers remembered per coordinate, by kind: with two shots, messages are averaged by owners of shards only."""
    owned = ("up_mean", "down_error") if config.reducer == "two_shot" else ()
    return {kind: 1 / ranks if kind in owned else 1.0 for kind in kinds(config)}


def _shares(config: GQSGDConfig) -> bool:
    """Whether all ranks have one scale."""
    return config.reducer in ("sum", "tree") or config.scale == "global"


def _omega(config: GQSGDConfig, ranks: int) -> float | None:
    """ω of what shares a scale; under one of all ranks, that is their n blocks, see `theory.theta_linear`."""
    if config.biased or config.clip or config.scale_per == "parameter":
        return None
    dimension = config.block_size * (ranks if _shares(config) else 1)
    return codec_of(config).omega(dimension, summed=ranks if config.reducer in ("sum", "tree") else 1)


@app.callback()
def _gqsgd() -> None:
    """Quantised gradient allreduce."""


@app.command()
def presets(
    name: Annotated[str | None, typer.Argument(help="A preset to show in full; none: a table of all.")] = None,
    ranks: Annotated[int, typer.Option(min=2, help="Number of ranks n.")] = 8,
    block_size: Annotated[
        int | None,
        typer.Option("--block-size", "--block-numel", help="Coordinates of a block."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What each preset sends, remembers and guarantees at a number of ranks."""
    try:
        if block_size is not None:
            GQSGDConfig(block_size=block_size)
        found = [facts_of(one, ranks, block_size) for one in ([name] if name else PRESETS)]
    except ConfigError as error:
        typer.echo(f"gqsgd: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        values = [one.to_dict() for one in found]
        typer.echo(json.dumps(values[0] if name else values, indent=1, ensure_ascii=False))
    elif name:
        _show(_in_full(found[0]))
    else:
        _show(_fitting_table(found), *notes(found))


def notes(found: Sequence[Facts]) -> list[str]:
    """What the table's columns mean, and why some of its presets cannot work."""
    return [*NOTES, *(f"{one.name}: not at n = {one.ranks}: {one.problem}" for one in found if one.problem)]


def _fitting_table(found: Sequence[Facts]) -> Table:
    """With as many columns as the terminal is wide enough for."""
    table = _table(found, ())
    if not sys.stdout.isatty():
        return table
    console = Console()
    unlimited = console.options.update(width=PIPED_WIDTH)
    for count in range(1, len(_DISPENSABLE) + 1):
        if Measurement.get(console, unlimited, table).maximum <= console.width:
            break
        table = _table(found, _DISPENSABLE[:count])
    return table


def _table(found: Sequence[Facts], left_out: tuple[str, ...]) -> Table:
    table = Table(title=f"Presets at n = {found[0].ranks}", title_justify="left", box=box.SIMPLE_HEAD)
    if left_out:
        table.caption = f"No room for {', '.join(left_out)}: see --json, or one preset by name."
        table.caption_justify = "left"
    kept = [column for column, heading in enumerate(HEADINGS) if heading not in left_out]
    for column in kept:
        heading = HEADINGS[column]
        numbers = heading in ("bits", "sent / fp32", "state")
        table.add_column(heading, justify="right" if numbers else "left", no_wrap=True)
    for one in found:
        cells = one.row()
        table.add_row(*(cells[column] for column in kept), style="dim" if one.problem else None)
    return table


def _in_full(one: Facts) -> Table:
    """All facts and fields, those marked that are not the default."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    config = one.config or one.preset.config
    lines = {"preset": one.name, "what": one.preset.what, "paper": one.preset.paper, "optimizer": one.preset.optimizer}
    lines |= {"config": config.describe()}
    if one.problem:
        lines[f"at n = {one.ranks}"] = f"cannot work: {one.problem}"
    else:
        memories = ", ".join(f"{kind} {count:.4g}" for kind, count in one.state.items()) or "nothing"
        scale = "" if one.omega is None and one.delta is None else f", scale shared by {one.sharing}"
        lines |= {
            f"at n = {one.ranks}": f"{config.reducer}, {one.wire_bits:.3f} bits per coordinate, "
            f"{one.sent_ratio:.3f} of the bytes of an fp32 ring allreduce",
            "remembers": f"{memories} (numbers per coordinate)",
            "bias": one.bias,
            "error": f"{one.constant}{scale}" if scale else "no constant: the scale is a whole parameter's",
        }
    lines |= {"warning": " ".join(one.warnings)} if one.warnings else {}
    for label, value in lines.items():
        grid.add_row(label, value)
    grid.add_row("", "")
    usual = GQSGDConfig()
    for field, value in config.to_dict().items():
        plain = value if isinstance(value, str) else json.dumps(value)
        changed = getattr(config, field) != getattr(usual, field)
        grid.add_row(field, f"{plain}  *" if changed else plain)
    grid.add_row("", "* not the default")
    return grid


def _show(*parts: RenderableType) -> None:
    """Print to the terminal at its width, or else as plain lines."""
    if sys.stdout.isatty():
        Console(highlight=False).print(*parts, sep="\n")
        return
    console = Console(width=PIPED_WIDTH, highlight=False, no_color=True)
    with console.capture() as captured:
        console.print(*parts, sep="\n")
    typer.echo("\n".join(line.rstrip() for line in captured.get().rstrip().splitlines()))


def main() -> None:
    """The console script."""
    app(prog_name="gqsgd")


if __name__ == "__main__":
    main()
