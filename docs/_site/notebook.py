"""Notebooks without Jupyter: runs one and keeps what its cells print and draw, and writes one as Markdown for the site.

    python docs/_site/notebook.py docs/tutorial.ipynb

runs all code cells in one namespace, in order, and writes the file anew with their outputs. A cell's outputs are what
it writes to standard output, in this process and in processes that it forks, and the figures that matplotlib has open
at its end. Magics (``%``, ``!``) are not supported.
"""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

#: Inches and dots per inch of pictures.
SIZE, DPI = (6.4, 3.2), 80


def run(path: Path) -> dict[str, Any]:
    """The notebook with the outputs of a new run."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            text = _run_cell("".join(cell["source"]), f"cell {count} of {path.name}", namespace)
            cell["execution_count"] = count
            cell["outputs"] = [] if not text else [{"name": "stdout", "output_type": "stream", "text": _lines(text)}]
            cell["outputs"] += [
                {"data": {"image/png": picture}, "metadata": {}, "output_type": "display_data"}
                for picture in _pictures()
            ]
    return notebook


def markdown(path: Path) -> str:
    """The notebook as Markdown: cells, and their outputs below them."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            else:
                words = cell["metadata"]["alt"]
                parts.append(f"![{words}](data:image/png;base64,{output['data']['image/png']})")
    return "\n\n".join(parts) + "\n"


def _run_cell(source: str, name: str, namespace: dict[str, Any]) -> str:
    """Run a cell; returns what it wrote to the file of standard output, whichever process wrote it."""
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            exec(compile(source, name, "exec"), namespace)  # noqa: S102
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        return file.read().decode()


def _pictures() -> list[str]:
    """All open figures as PNG in base64; they are closed."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    made = []
    for number in [] if pyplot is None else pyplot.get_fignums():
        figure, file = pyplot.figure(number), io.BytesIO()
        figure.set_size_inches(*SIZE)
        figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
        made.append(base64.b64encode(file.getvalue()).decode())
        pyplot.close(figure)
    return made


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> None:
    """Run the notebook that the command line names."""
    os.environ.setdefault("MPLBACKEND", "agg")
    path = Path(sys.argv[1])
    notebook = run(path)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
