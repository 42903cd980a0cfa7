"""Runs a command and draws what it prints as a terminal, for the README:

    python -m pictures.terminal docs/advise.svg -- gqsgd advise --model torchvision:resnet18 --link 1gbit --nodes 2 \\
        --backward 200ms --codec cpu

The text is the command's own output, as it is where output is no terminal, so that progress is one line after another.
The name of the folder that the command runs in is left out, and of progress lines in a row only the ends are kept.
The window is dark in light and in dark surroundings. No font comes from another host.
"""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

#: Characters in a line.
WIDTH = 110

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


def draw(lines: Sequence[str], command: str, path: Path) -> None:
    """Draw a command and its output.

    Args:
        lines: the output, line by line.
        command: as a user types it.
        path: the SVG file.
    """
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
    for line in lines:
        console.print(Text(line), soft_wrap=False)
    without_fonts = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    svg = console.export_svg(title="", theme=_THEME, code_format=without_fonts, unique_id="terminal")
    words = f'role="img" aria-label="Terminal: {command}, and what it prints" class="rich-terminal"'
    svg = svg.replace('class="rich-terminal"', words, 1).replace("Fira Code, monospace", "Menlo, Consolas, monospace")
    path.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n", encoding="utf-8")


def shortened(text: str, folder: Path) -> list[str]:
    """The lines of an output, without the name of a folder, and without the middle of runs of progress lines."""
    lines = [line.rstrip() for line in text.replace(f"{folder}/", "").splitlines()]
    kept: list[str] = []
    for number, line in enumerate(lines):
        before, after = lines[max(0, number - 1)], lines[min(len(lines) - 1, number + 1)]
        if _is_progress(line) and number and _is_progress(before) and _is_progress(after):
            continue
        kept.append(line)
    return kept


def _is_progress(line: str) -> bool:
    """Whether a line says how far a run is."""
    return bool(re.search(r"\bstep \d+/\d+ ", line))


def main() -> None:
    """Run the command line; it ends with the command's exit code."""
    arguments = sys.argv[1:]
    if len(arguments) < 3 or arguments[1] != "--":
        raise SystemExit(__doc__)
    command = arguments[2:]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode == 0:
        draw(shortened(done.stdout, Path.cwd()), shlex.join(command), Path(arguments[0]))
    else:
        sys.stderr.write(done.stdout)
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
