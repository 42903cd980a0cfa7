"""The commands of ``gqsgd``.

gqsgd presets --ranks 8
gqsgd presets diana --json
gqsgd systems check diana
gqsgd warmup gqsgd --dtype bfloat16
gqsgd probe --procs 2 --model torchvision:resnet18
gqsgd advise --model torchvision:resnet50 --link 10gbit --nodes 16 --gpus-per-node 8 --backward 120ms
gqsgd bench --procs 2
gqsgd bench training
gqsgd simulate gqsgd_4bit terngrad --workers 16
gqsgd doctor
torchrun --nproc-per-node 2 --no-python gqsgd doctor --nodes
gqsgd lighthouse

Each command imports what it needs when it runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

#: What a write to a place that takes no more bytes ends with.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

#: Exit code after an interrupt, as shells have it.
INTERRUPTED = 130

#: Options that several commands have.
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Procs = Annotated[int | None, typer.Option(help="Number of processes to start; not under a launcher.  [default: 2]")]


class _Commands(TyperGroup):
    """The commands. An interrupt ends them with `INTERRUPTED`, which old versions of typer do not do."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


def _print_version(wanted: bool) -> None:
    if wanted:
        from lightning_gqsgd.version import __version__

        typer.echo(f"gqsgd {__version__}")
        raise typer.Exit


@app.callback()
def _gqsgd(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Quantised gradient all-reduce.

    `gqsgd doctor` checks this machine. `gqsgd advise` predicts what compression gains on a cluster; see `gqsgd advise
    --help`.
    """


@contextmanager
def _refusals_in_one_line() -> Iterator[None]:
    """End a command with one line on standard error, and exit code 2, where what is inside ``with`` is refused."""
    from lightning_gqsgd.errors import ConfigError

    try:
        yield
    except ConfigError as error:
        typer.echo(f"gqsgd: {error}", err=True)
        raise typer.Exit(2) from None


def _print_json(values: Any) -> None:
    typer.echo(json.dumps(values, indent=1))  # ASCII, which every encoding of a terminal or a pipe has


def _run_as_ranks(procs: int | None, arguments: list[str]) -> None:
    """Run a command as ranks (None: 2) and end with their exit code, unless this process is one of a launcher's."""
    from lightning_gqsgd.cli import ranks
    from lightning_gqsgd.errors import ConfigError

    if not ranks.is_rank():
        raise typer.Exit(ranks.run_ranks(2 if procs is None else procs, arguments))
    if procs is not None:
        raise ConfigError("a launcher has started this process as one of its ranks; leave out --procs")


@app.command()
def presets(
    name: Annotated[str | None, typer.Argument(help="A preset to show in full. Default: a table of all.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Number of ranks n. Default: 8.", show_default=False)] = None,
    block_size: Annotated[
        int | None,
        typer.Option("--block-size", "--block-numel", help="Number of coordinates of a block."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what each preset sends, remembers and guarantees.

    Local steps, optimizers and topologies have separate tables below the first one.
    """
    from lightning_gqsgd.cli import asking
    from lightning_gqsgd.errors import check_integer
    from lightning_gqsgd.presets import PRESETS

    with _refusals_in_one_line():
        if ranks is not None:
            check_integer("--ranks", ranks, 2, asking.MOST_RANKS)
        if name is not None:
            asking.check_name(name)
    # Here, not above: they import torch, which takes seconds.
    from lightning_gqsgd.cli import facts, tables
    from lightning_gqsgd.cli.listing import LOCAL_STEPS, OTHER_SYSTEMS
    from lightning_gqsgd.config import GQSGDConfig

    listings = (LOCAL_STEPS, OTHER_SYSTEMS)
    for listing in listings:
        if name is not None and name in listing.names:
            with _refusals_in_one_line():
                asking.refuse_without_effect(name, {"--ranks": ranks, "--block-size": block_size})
            if as_json:
                _print_json(listing.to_dict(name))
            else:
                tables.show(listing.in_full(name))
            return
    with _refusals_in_one_line():
        if block_size is not None:
            GQSGDConfig(block_size=block_size)
        rows = [facts.facts_at(preset, ranks or 8, block_size) for preset in ([name] if name else PRESETS)]
    if as_json:
        values = [row.to_dict() for row in rows]
        if not name:
            values += [listing.to_dict(other) for listing in listings for other in listing.names]
        _print_json(values[0] if name else values)
    elif name:
        tables.show(tables.in_full(rows[0]))
    else:
        others = [part for listing in listings for part in ("", listing.table(), listing.note)]
        tables.show(tables.table_of_presets(rows), *facts.notes(rows), *others)


systems_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(systems_app, name="systems", help="Systems of the literature, and what they claim.")


@systems_app.callback()
def _systems() -> None:
    """Systems of the literature, and what they claim."""


@systems_app.command()
def check(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME", help="Names from `gqsgd presets`, or all, which takes minutes.")
    ],
    as_json: AsJson = False,
) -> None:
    """Run the smallest experiment of each named system.

    The experiments run in this process. The command prints what is claimed, what is measured, and the source. The exit
    code is 1 if a claim does not hold.
    """
    from lightning_gqsgd.cli import asking

    with _refusals_in_one_line():
        for name in names:
            asking.check_system(name)
    from lightning_gqsgd.cli import checking, tables, waiting

    with _refusals_in_one_line(), waiting.status("loading") as say:
        made = checking.checked(names, say)
    if as_json:
        _print_json([outcome.to_dict() for outcome in made])
    else:
        tables.show(checking.table(made), checking.summary(made))
    if not all(outcome.holds for outcome in made):
        raise typer.Exit(1)


@app.command()
def warmup(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="PRESET", help="Presets to compile for. Default: all.")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Dtype of gradients; repeatable.  [default: float32]")] = None,
    ranks: Annotated[
        list[int] | None, typer.Option(min=2, help="Number of ranks; repeatable.  [default: 2 and 8]")
    ] = None,
) -> None:
    """Compile the kernels for the CPU ahead of time.

    The compiled kernels are kept in a cache, where every training finds them. Use this e.g. while a container image is
    built.
    """
    from lightning_gqsgd.cli import warming
    from lightning_gqsgd.presets import PRESETS

    with _refusals_in_one_line():
        try:
            typer.echo(warming.warm(names or list(PRESETS), dtype or ["float32"], ranks or [2, 8]))
        except warming.NotKeptError as error:
            typer.echo(f"gqsgd: {error}", err=True)
            raise typer.Exit(1) from None


@app.command()
def probe(
    procs: Procs = None,
    output: Annotated[Path, typer.Option(help="File to write; `gqsgd advise` reads it with --probe.")] = Path(
        "probe.json"
    ),
    bits: Annotated[
        list[int] | None, typer.Option(min=1, max=8, help="Number of bits to time; repeatable.  [default: 8 4 3 2]")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Also measure when the buckets of this model are ready.")] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples per process in a step of the model.  [default: 32]")
    ] = None,
) -> None:
    """Measure the network and the kernels on these machines.

    Run this under torchrun on all nodes, under srun or mpirun, or without a launcher on one machine. It writes a file,
    which `gqsgd advise` reads with --probe.
    """
    from lightning_gqsgd.cli import probing, tables

    with _refusals_in_one_line():
        probing.check(model, batch, output)
        widths = [word for width in bits or [] for word in ("--bits", str(width))]
        chosen = [] if model is None else ["--model", model]
        samples = [] if batch is None else ["--batch", str(batch)]
        _run_as_ranks(procs, ["probe", "--output", str(output), *samples, *widths, *chosen])
        made = probing.run_rank(bits, model, batch)
        if made is not None:
            probing.save(made, output)
            for table in probing.tables(made):
                tables.show(table)
            typer.echo("\n".join([*probing.lines(made), f"written: {output}"]))


@app.command()
def advise(
    model: Annotated[
        str | None, typer.Option(help="The model: torchvision:NAME, transformers:TYPE or FOLDER, or module:factory.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Samples per rank in a step.  [default: the probe's, or 32]")
    ] = None,
    probe: Annotated[Path | None, typer.Option(help="File that `gqsgd probe` has written.")] = None,
    link: Annotated[str | None, typer.Option(help="Rate of a node's link, e.g. 10gbit.")] = None,
    latency: Annotated[
        str | None,
        typer.Option(
            help="Latency of the link. With --codec cpu, one that you give counts more often than the default, see "
            "docs/performance.md.  [default: 50us]"
        ),
    ] = None,
    intra: Annotated[
        str | None,
        typer.Option(
            help="Rate between the ranks of a node, in each direction.  [default: h100 3.6tbit, a100 2.4tbit, cpu "
            "16gbit, else 200gbit]"
        ),
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Number of nodes.  [default: the probe's, or 2]")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="Ranks per node.  [default: the probe's, or 1]")] = None,
    backward: Annotated[str | None, typer.Option(help="Duration of the backward pass, e.g. 120ms.")] = None,
    forward: Annotated[
        str | None, typer.Option(help="Duration of the forward pass.  [default: half of --backward]")
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(
            help="Speed of the codec: h100 or a100 (from the rated memory bandwidth), another bandwidth such as "
            "600GB/s, cpu (measured on one server core), or measured (by the probe).  "
            "[default: measured with --probe, else h100]"
        ),
    ] = None,
    fsdp: Annotated[
        bool, typer.Option("--fsdp", help="Train under FSDP2, with the model divided among ranks, instead of DDP.")
    ] = False,
    local_steps: Annotated[
        Path | None, typer.Option(help="JSON file of workers, server, learning and limits: plan local steps instead.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the prediction over the number of nodes and over the link's rate.")
    ] = None,
    gantt: Annotated[
        Path | None, typer.Option(help="Draw what happens in a step, at fp32, bf16, 8 and 4 bits.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict what compression gains on a cluster.

    The command recommends a number of bits. It needs no GPU and no network. Give --model, --backward and --link, or
    a --probe that was written with --model.
    """
    if local_steps is None:
        from lightning_gqsgd.cli import asking

        with _refusals_in_one_line():
            asking.check_network(probe, link)
    # Here, not above: they import torch, which takes seconds.
    from lightning_gqsgd.cli import advising, tables, waiting
    from lightning_gqsgd.predict.advice import (
        candidates,
        over_nodes,
        over_rates,
        recommendable,
        with_intervals,
        with_local_steps,
    )

    question = advising.Question(
        model, batch, probe, link, latency, intra, nodes, gpus_per_node, backward, forward, codec, fsdp or None
    )
    files = {option: file for option, file in (("--plot", plot), ("--gantt", gantt)) if file is not None}
    if local_steps is not None:
        from lightning_gqsgd.cli import planning

        with _refusals_in_one_line():
            planning.check_alone([*question.given(), *files])
            best, others = planning.plans(local_steps)
        if as_json:
            _print_json(planning.to_dict(best, others))
        else:
            typer.echo("\n".join(planning.lines(best, others)))
        return
    with _refusals_in_one_line(), waiting.status("building the model") as say:
        if files:  # matplotlib takes a while to import
            from lightning_gqsgd.predict import pictures

            pictures.check_files(files)
        cluster = question.cluster()
        choices = candidates(cluster, tick=lambda name: say(f"predicting {name}"))
        say("predicting intervals")
        choices = with_intervals(cluster, choices)
        say("predicting local steps")
        local = with_local_steps(cluster)
        if plot is not None or as_json:
            say("predicting other numbers of nodes and rates")
            by_nodes = over_nodes(cluster) if plot is not None or cluster.knows_other_nodes else {}
            by_rates = over_rates(cluster)
        if plot is not None:
            pictures.draw_sweeps(cluster, by_nodes, by_rates, plot)
        if gantt is not None:
            steps = {candidate.name: candidate.prediction for candidate in recommendable(choices)}
            pictures.draw_steps(steps, gantt)
    if as_json:
        _print_json(advising.to_dict(cluster, choices, local, by_nodes, by_rates))
        return
    tables.show(advising.table(cluster, choices, local))
    typer.echo("\n".join(advising.lines(cluster, choices, local)))


@app.command()
def bench(
    part: Annotated[
        str | None,
        typer.Argument(
            help="What to time: kernels, reducers, or training (steps of a small model).  [default: kernels, reducers]"
        ),
    ] = None,
    procs: Procs = None,
    megabytes: Annotated[
        float | None,
        typer.Option(min=0.1, max=1024, help="Size of the fp32 gradient to average, in MiB.  [default: 25]"),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=3, max=1000, help="Number of rounds; all cases take turns in each round.")
    ] = 15,
    as_json: AsJson = False,
) -> None:
    """Time kernels, all-reduces or training steps on this machine.

    Kernels are compared with a copy of the same tensor. All-reduces and steps are timed at fp32, bf16, 8 and 4 bits.
    """
    from lightning_gqsgd.cli import benching, tables

    with _refusals_in_one_line():
        benching.check(part, megabytes)
        size = [] if megabytes is None else ["--megabytes", str(megabytes)]
        words = [*([part] if part else []), *size, "--rounds", str(rounds), *(["--json"] if as_json else [])]
        _run_as_ranks(procs, ["bench", *words])
        made = benching.run_rank(part, megabytes, rounds)
        if made is None:
            return
    if as_json:
        _print_json(asdict(made))
        return
    tables.show(*benching.parts_of(made))


@app.command()
def simulate(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="PRESET", help="Presets to compare. Default: a few well-known ones.")
    ] = None,
    problem: Annotated[
        str, typer.Option(help="The problem: least_squares, logistic, or digits, which needs scikit-learn.")
    ] = "least_squares",
    workers: Annotated[int, typer.Option(min=1, max=256, help="Number of virtual workers.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps.")] = 200,
    lr: Annotated[float, typer.Option(help="Learning rate of SGD.")] = 0.1,
    as_json: AsJson = False,
) -> None:
    """Train a small problem under several presets.

    The workers are virtual and run in this process. The command prints losses and bytes.
    """
    from lightning_gqsgd.cli import simulating, tables, waiting

    with _refusals_in_one_line(), waiting.status("making the problem") as say:
        made = simulating.outcomes(names or simulating.DEFAULT_PRESETS, problem, workers, steps, lr, say)
    if as_json:
        _print_json([simulating.to_dict(run) for run in made])
    else:
        tables.show(simulating.table(made, problem, workers, steps), *simulating.notes(problem, workers))


@app.command()
def doctor(
    nodes: Annotated[
        bool, typer.Option("--nodes", help="Check the network between the ranks of a launcher instead.")
    ] = False,
) -> None:
    """Check whether this machine has what the package needs.

    The exit code is 1 if something that the package needs is missing.
    """
    if nodes:
        _doctor_of_nodes()
        return
    from lightning_gqsgd.cli import doctor as examination

    findings = examination.findings()
    typer.echo("\n".join(examination.lines(findings)))
    if any(finding.is_bad for finding in findings):
        raise typer.Exit(1)


def _doctor_of_nodes() -> None:
    from lightning_gqsgd.cli import doctor_nodes, tables

    with _refusals_in_one_line():
        findings = doctor_nodes.examine()
    if findings is None:
        return
    typer.echo(doctor_nodes.opening(findings))
    for table in doctor_nodes.tables(findings):
        tables.show(table)
    for line in doctor_nodes.warnings(findings):
        typer.echo(f"WARN  {line}")


@app.command()
def lighthouse(
    bind: Annotated[str, typer.Option(help="Host and port to listen on.")] = "[::]:29510",
    min_replicas: Annotated[int, typer.Option(help="Minimum number of members for a merge.")] = 1,
    join_timeout: Annotated[
        str, typer.Option(help="How long members wait for a member that hangs; set it longer than a round.")
    ] = "60s",
    heartbeat_timeout: Annotated[
        str, typer.Option(help="How long after its last heartbeat a member counts as gone.")
    ] = "5s",
) -> None:
    """Run the lighthouse of elastic trainings.

    The lighthouse is the server at which members meet. It runs until it is interrupted. Set
    TORCHFT_LIGHTHOUSE=HOST:PORT for the members (docs/elastic.md).
    """
    with _refusals_in_one_line():
        from lightning_gqsgd.membership.requirement import check_torchft

        check_torchft("a lighthouse")
        from lightning_gqsgd.cli import lighthouse as place

        place.serve(bind, min_replicas, join_timeout, heartbeat_timeout, lambda line: typer.echo(line))


def main() -> None:
    """The console script. One line says that it was interrupted, or that standard output cannot be written, e.g. to a
    full disk. Where standard output is closed (``>&-``), nothing is printed."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a locale such as en_US.ISO-8859-1 has no ω and no dash
    try:
        app(prog_name="gqsgd")
    except SystemExit as end:
        if end.code == INTERRUPTED and "RANK" not in os.environ:  # the process that has started ranks speaks for them
            typer.echo("gqsgd: interrupted", err=True)
        raise
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:  # of a file, not of what was printed
            raise
        # Python flushes standard output once more when it ends, and would print a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        typer.echo(f"gqsgd: standard output cannot be written ({error.strerror}); print to another place", err=True)
        sys.exit(1)
