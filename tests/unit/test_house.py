"""The package's rooms, which are its top-level folders and files, import each other in one direction only.

Every import counts, also those for types and those inside of functions.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import lightning_gqsgd

ROOT = Path(lightning_gqsgd.__file__).parent
PACKAGE = "lightning_gqsgd"
PAGE = Path(__file__).parents[2] / "docs" / "design.md"
#: Rooms from the bottom of the house upwards, as the page has them. A room imports rooms below it only.
ROOMS = tuple(
    reversed(re.findall(r"^\| `(\w+)(?:/|\.py)` \|", PAGE.read_text().split("## The house")[1].split("\n\n")[1], re.M))
)
#: Rooms that load no torch, so that command lines can check values at once.
PLAIN = ("errors", "spec")


def name_of(file: Path, root: Path) -> str:
    """The dotted name of a module in the package, without the package's own name."""
    return ".".join(file.relative_to(root).with_suffix("").parts).removesuffix("__init__").rstrip(".")


def imports_of(source: str, modules: set[str]) -> set[str]:
    """The modules of the package that a source imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            head, _, rest = name.partition(".")
            if head == PACKAGE:  # of `from a.b import c`, c is a module of a.b, or a name in it
                found.add(rest if rest in modules else rest.rpartition(".")[0])
    return found


def house(root: Path) -> dict[str, set[str]]:
    """What each module of a package imports of it."""
    files = {name_of(file, root): file for file in root.rglob("*.py")}
    return {name: imports_of(file.read_text(), set(files)) - {name} for name, file in files.items()}


def _defines(file: Path) -> bool:
    """Whether a file has functions or classes."""
    return any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in ast.parse(file.read_text()).body)


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """A way along arrows that ends where it begins; empty if there is none."""
    done: set[str] = set()

    def walk(way: list[str]) -> list[str]:
        for target in sorted(arrows[way[-1]]):
            if target in way:
                return [*way[way.index(target) :], target]
            if target in arrows and target not in done and (found := walk([*way, target])):
                return found
        done.add(way[-1])
        return []

    return next((found for start in arrows if start not in done and (found := walk([start]))), [])


@pytest.fixture(scope="module")
def arrows() -> dict[str, set[str]]:
    """What each module of the package imports of it."""
    return house(ROOT)


def test_every_room_is_on_the_page(arrows: dict[str, set[str]]) -> None:
    assert sorted({module.partition(".")[0] for module in arrows} - {""}) == sorted(ROOMS)
    assert len(ROOMS) <= 20


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_rooms_below_it_only(room: str, arrows: dict[str, set[str]]) -> None:
    allowed = {room, *ROOMS[: ROOMS.index(room)]}
    inside = {module: targets for module, targets in arrows.items() if module.partition(".")[0] == room}
    upwards = {
        f"{module} -> {t}" for module, targets in inside.items() for t in targets if t.split(".")[0] not in allowed
    }
    assert upwards == set()


def test_one_function_makes_all_engines() -> None:
    calls = {
        name_of(file, ROOT)
        for file in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Engine"
    }
    # Ranks of torchft have agreed in its quorum, and a benchmark of reductions has no model.
    assert calls == {"session.opening", "membership.process_group", "predict.bench"}


def test_no_modules_import_each_other_in_a_circle(arrows: dict[str, set[str]]) -> None:
    # A package that only passes names on has no ideas of its own.
    faces = {name_of(file, ROOT) for file in ROOT.rglob("__init__.py") if not _defines(file)} | {""}
    assert circle({module: targets - faces for module, targets in arrows.items() if module not in faces}) == []


@pytest.mark.parametrize("room", PLAIN)
def test_a_plain_room_imports_nothing_that_takes_long(room: str) -> None:
    for file in ROOT.rglob("*.py"):
        if name_of(file, ROOT).partition(".")[0] == room:
            nodes = list(ast.walk(ast.parse(file.read_text())))
            names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
            names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
            assert not {name.partition(".")[0] for name in names} & {"torch", "numpy", "numba", "triton"}, file


@pytest.mark.parametrize("room", ROOMS[ROOMS.index("spec") + 1 : ROOMS.index("config")])
def test_nothing_below_the_configuration_sees_its_fields(room: str, arrows: dict[str, set[str]]) -> None:
    seen = {module for module, targets in arrows.items() if module.split(".")[0] == room and "spec.fields" in targets}
    assert seen == set()


def test_imports_for_types_and_inside_of_functions_count(tmp_path: Path) -> None:
    for name, text in {
        "a": "def f():\n    from lightning_gqsgd.b import g\n",
        "b": "if TYPE_CHECKING:\n    from lightning_gqsgd import c\n",
        "c": "import lightning_gqsgd.a\n",
        "d": "from lightning_gqsgd.a import f\n",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    arrows = house(tmp_path)
    assert arrows == {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert circle(arrows) == ["a", "b", "c", "a"]
    assert circle({**arrows, "c": set()}) == []
