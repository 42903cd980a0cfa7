"""What the package reads is data and never code: no pickle from files or peers, no eval, no shell."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "lightning_gqsgd").rglob("*.py"))
#: Modules that run what they read.
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
#: Functions that run what they are given.
FUNCTIONS = {"eval", "exec", "compile", "__import__"}
#: What stands in a module all the same, and why.
ALLOWED = {
    # Numba gives machine code as pickles. Who can write to the cache's folder can run code anyway; see SECURITY.md.
    "lightning_gqsgd/kernels/cpu/cache.py": ["imports pickle"],
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
        if name in ("torch.load", "np.load", "numpy.load"):
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


@pytest.mark.parametrize("file", PACKAGE, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_module_runs_what_it_reads(file: Path) -> None:
    found = [text.partition(": ")[2] for text in violations(file.read_text())]
    assert found == ALLOWED.get(str(file.relative_to(ROOT)), [])


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from dill import loads",
        "eval(text)",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
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
