"""What the package and its programs read is data and never code: no pickle from files or peers, no eval, no shell."""

from __future__ import annotations

import ast
import doctest
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Where sources are searched: the package, and the programs around it.
FOLDERS = ("lightning_gqsgd", "recipes", "benchmarks", "examples", "netlab", "pictures", "workloads", "docs")
SOURCES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
#: Pages whose Python code readers copy.
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: Modules that run what they read.
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
#: Functions that run what they are given.
FUNCTIONS = {"eval", "exec", "compile", "__import__"}
#: What stands in a module all the same, and why.
ALLOWED = {
    # Numba gives machine code as pickles. Who can write to the cache's folder can run code anyway; see SECURITY.md.
    "lightning_gqsgd/kernels/cpu/cache.py": ["imports pickle"],
    # The name of a benchmark's dtype comes from its own command line.
    "benchmarks/gpu_kernels.py": ["looks up a name in torch"],
    # The site runs the notebooks of this repository while it is built.
    "docs/_site/notebook.py": ["calls exec", "calls compile"],
}
#: Calls of torch.distributed that send pickles.
OBJECTS = {"broadcast_object_list", "all_gather_object", "scatter_object_list", "send_object_list", "gather_object"}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call, with the dotted name of what is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def violations(source: str) -> list[str]:
    """What a source must not have, as ``line: what``."""
    tree, found = ast.parse(source), []
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [f"{node.lineno}: imports {name}" for name in names if name.partition(".")[0] in MODULES]  # type: ignore[attr-defined]
    for name, call in calls(tree):
        last, keywords = name.rpartition(".")[2], {keyword.arg: keyword.value for keyword in call.keywords}
        if name in FUNCTIONS:
            found.append(f"{call.lineno}: calls {name}")
        if name in ("np.load", "numpy.load"):  # NumPy refuses pickles unless it is told otherwise
            allows = keywords.get("allow_pickle", ast.Constant(False))
            if not (isinstance(allows, ast.Constant) and allows.value is False):
                found.append(f"{call.lineno}: calls {name} with allow_pickle")
        if name == "torch.load":
            only = keywords.get("weights_only")
            if not (isinstance(only, ast.Constant) and only.value is True):
                found.append(f"{call.lineno}: calls {name} without weights_only=True")
        if last in OBJECTS:
            found.append(f"{call.lineno}: sends pickles by {name}")
        shell = keywords.get("shell")
        if name == "os.system" or (isinstance(shell, ast.Constant) and shell.value):
            found.append(f"{call.lineno}: starts a shell")
        if name == "getattr" and ast.unparse(call.args[0]) == "torch" and not isinstance(call.args[1], ast.Constant):
            found.append(f"{call.lineno}: looks up a name in torch")
    return found


def test_no_module_runs_what_it_reads() -> None:
    found = {str(file.relative_to(ROOT)): violations(file.read_text()) for file in SOURCES}
    assert {file: [text.partition(": ")[2] for text in texts] for file, texts in found.items() if texts} == ALLOWED


def test_no_page_shows_code_that_runs_what_it_reads() -> None:
    for page in PAGES:
        for code in re.findall(r"^ *```(?:python|py)[^\n]*\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE):
            source = textwrap.dedent(code)
            script = doctest.script_from_examples(source) if source.startswith(">>>") else source
            assert violations(script) == [], (page, code)


def test_known_vulnerabilities_are_looked_for_in_the_locked_versions_by_a_pinned_program() -> None:
    workflow = (ROOT / ".github/workflows/security.yml").read_text()
    assert re.search(r"uvx pip-audit@\d+\.\d+\.\d+ --requirement requirements\.txt --no-deps", workflow)
    assert re.search(r"uv export --locked .*--output-file requirements\.txt", workflow)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from dill import loads",
        "eval(text)",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "np.load(file, allow_pickle=True)",
        "numpy.load(file, allow_pickle=trusted)",
        "dist.broadcast_object_list(names)",
        "subprocess.run(command, shell=True)",
        "getattr(torch, name)",
    ],
)
def test_the_search_finds_what_it_is_for(source: str) -> None:
    assert len(violations(source)) == 1


def test_the_threat_model_is_written_down() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    for words in ("trusted", "not encrypted", "weights_only=True", "pickle"):
        assert words in text
