"""Runs a command and draws what it prints as a terminal, for the README:

    python -m pictures.terminal docs/advise.svg -- gqsgd advise --model torchvision:resnet18 --link 1gbit --nodes 2 \\
        --backward 200ms --codec cpu

The text is the command's own output, as it is where output is no terminal, so that progress is one line after another.
The name of the folder that the command runs in is left out, and of progress lines in a row only the ends are kept.
The window is dark in light and in dark surroundings. No font comes from another host.

With ``--recorded`` after the file's name, lines appear when they came, at several times the speed, and stay; for
readers who want no motion, all are there from the start.
"""

from __future__ import annotations

import html
import io
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

#: Characters in a line.
WIDTH = 114
#: How many times as fast as it was a recording is played, and the longest pause in it, in seconds.
SPEED, LONGEST_S = 3.0, 3.0

#: Light text on a dark ground, with a contrast of more than 7 to 1 for each colour.
_THEME = TerminalTheme(
    (22, 27, 34),
    (230, 237, 243),
    [
        (110, 118, 129),
        (255, 161, 152),
        (126, 231, 135),
        (242, 204, 96),
        (165, 214, 255),
        (226, 197, 255),
        (118, 227, 234),
    ]
    + [(240, 246, 252)],
)


def draw(lines: Sequence[str], command: str, path: Path, seconds: Sequence[float] = ()) -> None:
    """Draw a command and its output.

    Args:
        lines: the output, line by line.
        command: as a user types it.
        path: the SVG file.
        seconds: when each line came, from the start of the command, for a recording.
    """
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
    rows = [len(Text(f"$ {command}").wrap(console, WIDTH))]
    for line in lines:
        console.print(Text(line), soft_wrap=False)
        rows.append(max(1, len(Text(line).wrap(console, WIDTH))))
    without_fonts = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    svg = console.export_svg(title="", theme=_THEME, code_format=without_fonts, unique_id="terminal")
    label = html.escape(f"Terminal: {command}, and what it prints")
    words = f'role="img" aria-label="{label}" class="rich-terminal"'
    svg = svg.replace('class="rich-terminal"', words, 1).replace("Fira Code, monospace", "Menlo, Consolas, monospace")
    if seconds:
        svg = svg.replace("</style>", f"{_motion(rows, _played(seconds))}</style>", 1)
    path.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n", encoding="utf-8")


def _played(seconds: Sequence[float]) -> list[float]:
    """When each line appears in a recording that began with the command."""
    pauses = [later - earlier for earlier, later in zip([0.0, *seconds], seconds, strict=False)]
    total, times = 0.5, []  # the command stands alone for a moment
    for pause in pauses:
        total += min(pause / SPEED, LONGEST_S)
        times.append(total)
    return times


def _motion(rows: Sequence[int], times: Sequence[float]) -> str:
    """The rules that let lines appear; ``rows``: rows of the command, and of each line."""
    rules, row = [], rows[0]
    for count, appears in zip(rows[1:], times, strict=True):
        chosen = ",".join(f'[clip-path="url(#terminal-line-{number})"]' for number in range(row, row + count))
        rules.append(f"{chosen}{{animation:appear 1ms {appears:.2f}s both}}")
        row += count
    return (
        "@keyframes appear{from{visibility:hidden}}\n"
        "@media (prefers-reduced-motion:no-preference){\n" + "\n".join(rules) + "}\n"
    )


def shortened(lines: Sequence[str], folder: Path) -> list[tuple[int, str]]:
    """Numbers and texts of the lines of an output that are kept.

    The name of a folder is left out, and so are the lines of progress between the first and the last of a row.
    """
    lines = [line.rstrip().replace(f"{folder}/", "") for line in lines]
    kept = []
    for number, line in enumerate(lines):
        around = lines[max(0, number - 1)], lines[min(len(lines) - 1, number + 1)]
        if not (number and _is_progress(line) and all(map(_is_progress, around))):
            kept.append((number, line))
    return kept


def _is_progress(line: str) -> bool:
    """Whether a line says how far a run is."""
    return bool(re.search(r"\bstep \d+/\d+ ", line))


def main() -> None:
    """Run the command line; it ends with the command's exit code."""
    before, divider, command = _split(sys.argv[1:])
    if not divider or not command or before[1:] not in ([], ["--recorded"]):
        raise SystemExit(__doc__)
    lines, seconds, code = _run(command)
    if code:
        sys.stderr.write("\n".join(lines) + "\n")
        raise SystemExit(code)
    kept = shortened(lines, Path.cwd())
    times = [seconds[number] for number, _ in kept] if before[1:] else []
    draw([line for _, line in kept], shlex.join(command), Path(before[0]), times)


def _split(arguments: list[str]) -> tuple[list[str], bool, list[str]]:
    """What stands before ``--``, whether it is there, and the command behind it."""
    if "--" not in arguments:
        return arguments, False, []
    place = arguments.index("--")
    return arguments[:place], place > 0, arguments[place + 1 :]


def _run(command: Sequence[str]) -> tuple[list[str], list[float], int]:
    """The lines that a command prints, the seconds after which each came, and the exit code."""
    lines, seconds = [], []
    begun = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            seconds.append(time.monotonic() - begun)
    return lines, seconds, process.returncode


if __name__ == "__main__":
    main()
