"""What a comparison says and writes when its runs are finished: tables, plots, the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from recipes.comparison.finished import Finished, Hardware
from recipes.comparison.headline import save_headline
from recipes.comparison.overview import side_by_side
from recipes.comparison.page import AXES, Section, write_page
from recipes.comparison.pairs import PAIRS_FILE, pair_table, pairs_of, write_pairs
from recipes.comparison.plan import Plan, Settings, slug
from recipes.comparison.plots import save_curves, save_family, save_step_times
from recipes.comparison.predictions import beside_measured
from recipes.comparison.results import (
    BOUND_NOTE,
    Run,
    cells,
    common_target,
    compare,
    headings,
    knows_bound,
    write_tables,
)
from recipes.comparison.runner import Failure, name_of
from recipes.comparison.seeds_and_curves import write_curves, write_seeds
from recipes.comparison.slower_links import elsewhere
from recipes.errors import RecipeError
from recipes.loggers.chosen import wandb_settings


def check_one_data_set(plan: Plan, failed: set[Path]) -> None:
    """Refuse to compare runs of equal settings whose data were others: some had a stand-in, and others the data."""
    found: dict[str, dict[str, list[str]]] = {}
    for cell in (*plan.cells, *plan.probes):
        if cell.folder not in failed:
            name = str(Run.load(cell.folder).facts["data"])
            asked = repr({key: value for key, value in cell.config["data"].items() if key != "seed"})
            found.setdefault(asked, {}).setdefault(name, []).append(cell.folder.name)
    for folders in found.values():
        if len(folders) > 1:
            listed = "; ".join(f"{name}: {', '.join(those)}" for name, those in folders.items())
            raise RecipeError(
                f"the runs have the same settings of data, and had different data: {listed}. Their values cannot be "
                f"compared; run all again with --fresh, or delete those of the wrong data in {plan.folder}/cells"
            )


def report(plan: Plan, failed: set[Path], command: str, console: Console) -> None:
    """Print tables and the paths of all files, which are written.

    Args:
        plan: the comparison.
        failed: folders of the runs that have no result.
        command: the command line that reproduces the comparison.
        console: where tables are printed.
    """
    sections = [_section(plan, link, variants) for link, variants in _results(plan, failed).items() if variants]
    if not sections:
        console.print("no run has finished: no table")
        return
    files: list[Path] = []
    for section in sections:
        _show_table(section, console)
        files += _write(section)
    files += _write_pairs(sections[0], plan.folder, console)
    _say_bound(sections, console)
    for section in sections:
        if section.elsewhere:
            console.print("\n".join(["", *section.elsewhere.lines, ""]), highlight=False)
            console.print(
                f"measured instead, on Linux and as root: {command} hardware=netlab links=100mbit", highlight=False
            )
    files.append(plan.folder / "comparison.html")
    write_page(
        sections,
        sections[0].title if len(sections) == 1 else _title(plan, sections[0].variants, None),
        command,
        files[-1],
    )
    _list(files, console)
    if any(wandb_settings(cell.config) is not None for cell in plan.cells):
        # Here, not above: the module imports Lightning, which takes seconds.
        from recipes.comparison.dashboard import publish

        publish(plan, sections[0].lines[0].metric, _title(plan, sections[0].variants, None), files, console)


def report_finished(finished: Finished, settings: Settings, command: str, console: Console) -> None:
    """The same for finished runs: a section for each kind of hardware, and tables in which they stand side by side."""
    every = [found.run for found in finished.chosen]
    # One target for all kinds of hardware: seconds to different values could not be compared.
    target = common_target({"all": every}) if settings.target is None else settings.target
    folder = Path(settings.output).absolute() / f"{slug(every[0].facts['title'])}-finished"
    sections = {hardware: _finished_section(finished, hardware, target, folder) for hardware in finished.by_hardware}
    files: list[Path] = []
    for section in sections.values():
        _show_table(section, console)
        files += [*_write(section), *_write_pairs(section, section.folder, console)]
    overviews = side_by_side({hardware.name: section.lines for hardware, section in sections.items()}, target)
    for overview in overviews:
        heads, *rows = overview.rows
        console.print(_table(overview.title, heads, rows, 1), soft_wrap=False)
    _say_bound(list(sections.values()), console)
    for line in finished.left_out:
        console.print(f"left out: {line}", highlight=False)
    page = folder / "comparison.html"
    notes = [f"Left out: {line}" for line in finished.left_out]
    write_page(list(sections.values()), finished.title, command, page, overviews, notes)
    files.append(page)
    _list(files, console)
    if any(wandb_settings(found.config) is not None for found in finished.chosen):
        # Here, not above: the module imports Lightning, which takes seconds.
        from recipes.comparison.dashboard import publish_finished

        publish_finished(finished, folder, files, console)


def _finished_section(finished: Finished, hardware: Hardware, target: float, comparison: Path) -> Section:
    variants = finished.by_hardware[hardware]
    configs = [found.config for found in finished.of(hardware)]
    return Section(
        f"{finished.title}, {hardware.words}",
        comparison / slug(hardware.name),
        variants,
        compare(variants, target),
        target,
        elsewhere(configs, variants),
        beside_measured(configs, None, variants),
    )


def _write_pairs(section: Section, folder: Path, console: Console) -> list[Path]:
    """Show and write the differences from plain DDP seed by seed; no file where no pair has two seeds."""
    heads, *rows = pair_table(pairs_of(section.variants)) or [[]]
    if not rows:
        (folder / PAIRS_FILE).unlink(missing_ok=True)  # an earlier comparison of other seeds has left it
        return []
    console.print(_table("seed by seed", heads, rows, 1), soft_wrap=False)
    return [write_pairs(heads, rows, folder)]


def _say_bound(sections: Sequence[Section], console: Console) -> None:
    if any(knows_bound(section.lines) for section in sections):
        console.print(BOUND_NOTE, style="dim", highlight=False, soft_wrap=False)


def _list(files: Sequence[Path], console: Console) -> None:
    """Print what each file is, and where."""
    for file in files:
        kind = {".png": "plot", ".svg": "plot", ".html": "page"}.get(file.suffix, "table")
        console.print(f"{kind}: {file}", highlight=False)


def _results(plan: Plan, failed: set[Path]) -> dict[str | None, dict[str, list[Run]]]:
    """Runs of each variant, by link; a comparison without links has the one key None."""
    trained: dict[str, list[Run]] = {}
    for cell in plan.cells:
        if cell.folder not in failed:
            trained.setdefault(cell.variant, []).append(Run.load(cell.folder))
    if not plan.probes:
        return {None: trained}
    by_link: dict[str | None, dict[str, list[Run]]] = {}
    for cell in plan.probes:
        if cell.folder not in failed and cell.variant in trained:
            probe = Run.load(cell.folder)
            timed = [run.at_speed_of(probe) for run in trained[cell.variant]]
            by_link.setdefault(cell.link, {})[cell.variant] = timed
    return by_link


def _section(plan: Plan, link: str | None, variants: dict[str, list[Run]]) -> Section:
    given = plan.settings.target
    target = common_target(variants) if given is None else given
    folder = plan.folder / link if link else plan.folder
    configs = [cell.config for cell in plan.cells]
    slower = None if link else elsewhere(configs, variants)
    predicted = beside_measured(configs, link, variants)
    return Section(_title(plan, variants, link), folder, variants, compare(variants, target), target, slower, predicted)


def _show_table(section: Section, console: Console) -> None:
    lines = section.lines
    heads, rows = headings(lines[0].metric, section.target), [cells(line) for line in lines]
    shown, padding = _fitting(heads, rows, console.width)
    titles, values = [heads[column] for column in shown], [[row[column] for column in shown] for row in rows]
    console.print(_table(section.title, titles, values, padding), soft_wrap=False)
    left_out = [heading for number, heading in enumerate(heads) if number not in shown]
    if left_out:
        console.print(f"left out at this width, but in the files: {', '.join(left_out)}", style="dim", highlight=False)


def _write(section: Section) -> list[Path]:
    """Write tables and plots of one section; returns their paths."""
    folder, variants = section.folder, section.variants
    folder.mkdir(parents=True, exist_ok=True)
    files = list(write_tables(section.lines, section.target, section.title, folder))
    files += [write_seeds(variants, section.target, folder), write_curves(variants, folder)]
    files += _draw_curves(section)
    if (in_loss := section.in_loss) is not None:
        files += _draw_curves(in_loss)
    files.append(folder / "step_time.png")
    save_step_times(variants, section.title, files[-1], predicted=section.predicted)
    files += save_headline(variants, section.lines, section.target, section.title, folder / "headline.png")
    family = folder / "family.png"
    if save_family(section.lines, section.title, family):
        files.append(family)
    else:
        family.unlink(missing_ok=True)  # an earlier comparison of other variants has left it
    return files


def _draw_curves(section: Section) -> list[Path]:
    """Draw what a section is judged by against every axis; returns the files."""
    files = [section.folder / f"{section.lines[0].metric.file}_{axis}.png" for axis in AXES]
    for axis, file in zip(AXES, files, strict=True):
        save_curves(section.variants, axis, section.title, file, section.target if axis == "time" else float("nan"))
    return files


#: Columns that are left out first where the console is too narrow, by their number in `headings`.
LESS_IMPORTANT = (10, 3, 1, 7, 11, 12, 5)


def _fitting(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> tuple[list[int], int]:
    """Numbers of the columns that fit into ``width``, and the padding for which there is room: 1 or 0."""
    widths = _widths(heads, rows)
    shown = list(range(len(heads)))
    for column in (None, *LESS_IMPORTANT):
        shown = [number for number in shown if number != column]
        least = sum(widths[number] for number in shown) + len(shown) + 1
        if least <= width:
            break
    return shown, int(least + 2 * len(shown) <= width)


def _widths(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """Least width of each column; headings may be broken at spaces, numbers never."""
    return [max(*(len(row[number]) for row in rows), *map(len, head.split())) for number, head in enumerate(heads)]


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], padding: int) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, padding))
    for number, (heading, width) in enumerate(zip(heads, _widths(heads, rows), strict=True)):
        table.add_column(heading, justify="left" if number == 0 else "right", width=width)
    for row in rows:
        table.add_row(*row)
    return table


def _title(plan: Plan, variants: dict[str, list[Run]], link: str | None) -> str:
    facts = next(iter(variants.values()))[0].facts
    data = " / ".join(sorted({run.facts["data"] for runs in variants.values() for run in runs}))
    processes = _joined(str(run.facts["processes"]) for runs in variants.values() for run in runs)
    title = (
        f"{plan.experiment} on {data}: {facts['model']}, {processes} {'process' if processes == '1' else 'processes'}"
    )
    return ", ".join([title, f"links of {link}"] if link else [title, *_hardware(plan)])


def _hardware(plan: Plan) -> list[str]:
    """All profiles and rates, e.g. ``["netlab 100mbit / 1gbit"]``; an empty list if all cells run on cpu."""
    profiles = [cell.config["hardware"] for cell in plan.cells]
    names = _joined(profile["name"] for profile in profiles)
    rates = _joined(str(profile["rate"]) for profile in profiles if profile.get("rate", "none") != "none")
    return [] if names == "cpu" else [f"{names} {rates}".strip()]


def _joined(values: Iterable[str]) -> str:
    return " / ".join(dict.fromkeys(values))


def show_failure(failure: Failure, console: Console) -> None:
    """Print why a run has failed, with the end of its output."""
    cell = failure.cell
    console.rule(f"{name_of(cell)}: {failure.reason}")
    console.print(failure.tail, highlight=False)
    console.rule(str(cell.folder))
