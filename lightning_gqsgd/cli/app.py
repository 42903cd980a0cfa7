"""The commands of ``gqsgd``.

gqsgd presets --ranks 8
gqsgd presets diana --json
gqsgd warmup gqsgd --dtype bfloat16

Each command imports what it needs when it runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


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
    from lightning_gqsgd.cli import facts, tables
    from lightning_gqsgd.config import GQSGDConfig
    from lightning_gqsgd.errors import ConfigError
    from lightning_gqsgd.presets import PRESETS

    try:
        if block_size is not None:
            GQSGDConfig(block_size=block_size)
        rows = [facts.facts_of(preset, ranks, block_size) for preset in ([name] if name else PRESETS)]
    except ConfigError as error:
        typer.echo(f"gqsgd: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        values = [row.to_dict() for row in rows]
        typer.echo(json.dumps(values[0] if name else values, indent=1, ensure_ascii=False))
    elif name:
        tables.show(tables.in_full(rows[0]))
    else:
        tables.show(tables.fitting_table(rows), *facts.notes(rows))


@app.command()
def warmup(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="PRESET", help="Presets to compile for; none: all.")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Dtype of gradients, repeatable.  [default: float32]")] = None,
    ranks: Annotated[
        list[int] | None, typer.Option(min=2, help="Number of ranks, repeatable.  [default: 2 and 8]")
    ] = None,
) -> None:
    """Compile the kernels for the CPU into the cache, so that no training has to: for images of containers."""
    from lightning_gqsgd.cli import warming
    from lightning_gqsgd.errors import ConfigError
    from lightning_gqsgd.presets import PRESETS

    try:
        typer.echo(warming.warm(names or list(PRESETS), dtype or ["float32"], ranks or [2, 8]))
    except ConfigError as error:
        typer.echo(f"gqsgd: {error}", err=True)
        raise typer.Exit(2) from None
    except warming.NoFolderError as error:
        typer.echo(f"gqsgd: {error}", err=True)
        raise typer.Exit(1) from None


def main() -> None:
    """The console script."""
    app(prog_name="gqsgd")
