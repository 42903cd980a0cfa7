"""The documentation: its navigation, links, numbers, and the commands that it quotes.

What MkDocs itself finds wrong is the strict build's to say, which .ci/run makes.
"""

from __future__ import annotations

import ast
import doctest
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from typer.main import get_command

from lightning_gqsgd.cli.app import app
from lightning_gqsgd.config import GQSGDConfig
from recipes.comparison.plan import settings_of
from recipes.configuration import compose_configuration
from recipes.strategies.choices import strategies

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("docs/**/*.md", "benchmarks/results/*.md", "recipes/README.md", "README.md")
    for path in ROOT.glob(pattern)
)

#: What stands for a value in a quoted command.
PLACEHOLDERS = {"N": "8", "NAME": "gqsgd"}

#: What compare.py reads itself: the fields of its class of settings, which would take Lightning to import.
COMPARE_SETTINGS = {
    field.target.id
    for node in ast.parse((ROOT / "recipes" / "comparison" / "plan.py").read_text()).body
    if isinstance(node, ast.ClassDef) and node.name == "Settings"
    for field in node.body
    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
}

_PROGRAM = r"(?P<program>python recipes/(?:run|compare)\.py|python -m (?:benchmarks\.\w+|netlab)|gqsgd(?= [a-z-]))"
_COMMAND = re.compile(rf"(?:^ *|`)(?:uv run )?{_PROGRAM}(?P<arguments>(?:\\\n|[^`\n])*)", re.MULTILINE)


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Program and arguments of every command in code, without comments and what comes after ``--``."""
    for match in _COMMAND.finditer(text):
        arguments = shlex.split(match["arguments"].replace("\\\n", " "), comments=True)
        yield match["program"], arguments[: arguments.index("--") if "--" in arguments else None]


QUOTED = sorted({(program, *arguments) for page in PAGES for program, arguments in commands((ROOT / page).read_text())})


def quoted(program: str) -> list[list[str]]:
    """The arguments with which pages call a program."""
    return [list(arguments) for name, *arguments in QUOTED if name == program]


def _module(name: str) -> Any:
    """A module of docs/_site."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "_site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def hooks() -> Any:
    """docs/_site/hooks.py."""
    return _module("hooks")


def _leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for one in nav.values() if isinstance(nav, dict) else nav:
            yield from _leaves(one)


def test_the_navigation_has_every_page_once() -> None:
    listed = list(_leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    pages = [page.removeprefix("docs/") for page in PAGES if page != "README.md"]
    notebooks = [path.with_suffix(".md").name for path in (ROOT / "docs").glob("*.ipynb")]
    assert sorted(listed) == sorted([*pages, *notebooks])


def test_every_example_is_linked_from_a_page() -> None:
    text = "".join((ROOT / page).read_text() for page in PAGES)
    examples = [path for path in (ROOT / "examples").iterdir() if path.is_file()]
    assert [path.name for path in examples if f"/examples/{path.name})" not in text] == []


def test_the_page_of_the_command_line_has_the_help_of_the_commands() -> None:
    """`python docs/_site/commands.py` writes it anew."""
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert text == _module("commands").markdown()
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert [f"## gqsgd {name}" for name in commands] == re.findall(r"^## .*$", text, re.MULTILINE)
    for name, command in commands.items():
        section = text.partition(f"## gqsgd {name}\n")[2].partition("\n## ")[0]
        options = [word for one in command.params for word in one.opts if word.startswith("--") and word != "--help"]
        assert [word for word in options if f"`{word}`" not in section] == []


def test_the_colours_may_follow_the_system() -> None:
    palette = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["theme"]["palette"]
    asked = [state["media"] for state in palette]
    assert asked == ["(prefers-color-scheme)", "(prefers-color-scheme: light)", "(prefers-color-scheme: dark)"]
    assert [state.get("scheme") for state in palette] == [None, "default", "slate"]


@pytest.mark.parametrize(
    ("page", "text", "found"),
    [
        ("docs/api/x.md", "[a](../../LICENSE) ![b](../presets.png)", ["LICENSE", "docs/presets.png"]),
        ("docs/method.md", "[a](../benchmarks/results/family.md#x 'T')", ["benchmarks/results/family.md"]),
        ("README.md", "[a]: docs/method.md 'T'", ["docs/method.md"]),
        ("README.md", "[all](benchmarks/results)", ["docs/benchmarks.md"]),
        ("README.md", "`[a](LICENSE)`\n\n    [b](LICENSE)\n\n```\n[c](LICENSE)\n```\n[d](LICENSE)", ["LICENSE"]),
        ("README.md", "[a](https://arxiv.org) [b](#top) [c](nowhere.md) [d](../README.md) [e](/README.md)", []),
    ],
)  # fmt: skip
def test_links_are_read(hooks: Any, page: str, text: str, found: list[str]) -> None:
    assert hooks.links(page, text) == found


def test_a_link_to_a_notebook_leads_to_its_page(hooks: Any) -> None:
    assert hooks.links("README.md", "[a](docs/tutorial.ipynb)") == ["docs/tutorial.ipynb"]
    assert hooks._place("docs/tutorial.ipynb") == "tutorial.md"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(hooks: Any, page: str) -> None:
    targets = []
    hooks._with_links((ROOT / page).read_text(), lambda link: targets.append(link) or link)
    outward = re.compile(r"https?://|#|mailto:")
    lost = [one for one in targets if not outward.match(one) and hooks.resolve(page, one) is None]
    assert not [one for one in lost if not (page == "README.md" and (ROOT / one).is_dir())]


@pytest.mark.parametrize("page", [page for page in PAGES if ">>> " in (ROOT / page).read_text()])
def test_numbers_are_what_the_functions_return(page: str) -> None:
    failed, tried = doctest.testfile(str(ROOT / page), module_relative=False, encoding="utf-8")
    assert tried
    assert not failed


def test_commands_are_found() -> None:
    text = "x `gqsgd presets --ranks N` y\n\n    python recipes/run.py \\\n        a=1  # b\n\n"
    text += "uv run python -m benchmarks.x -- c\n"
    assert list(commands(text)) == [
        ("gqsgd", ["presets", "--ranks", "N"]),
        ("python recipes/run.py", ["a=1"]),
        ("python -m benchmarks.x", []),
    ]
    assert {"target", "output"} <= COMPARE_SETTINGS
    assert len(quoted("python recipes/run.py")) >= 5
    assert len(quoted("python recipes/compare.py")) >= 10
    assert len([name for name, *_ in QUOTED if name.startswith("python -m benchmarks.")]) >= 6
    assert len(quoted("python -m netlab")) >= 2


@pytest.mark.parametrize("arguments", quoted("gqsgd"), ids=" ".join)
def test_gqsgd_has_the_command(arguments: list[str]) -> None:
    if arguments == ["--help"]:
        return
    command, *rest = (PLACEHOLDERS.get(one, one) for one in arguments)
    get_command(app).commands[command].make_context(command, rest)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        pytest.param(script, arguments, marks=[pytest.mark.slow] * (number % 4 > 0))  # a fourth of them always
        for script in ("run", "compare")
        for number, arguments in enumerate(quoted(f"python recipes/{script}.py"))
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_recipes_compose(script: str, arguments: list[str]) -> None:
    """With the first of each comma list; of the others, those of a group name a file."""
    if "--from" in arguments:
        place = arguments.index("--from")
        settings = [one for one in arguments[place + 1 :] if "=" in one]
        assert len(settings) < len(arguments) - place - 1, "compare.py --from takes folders"
        settings_of([*arguments[:place], *settings])
        return
    lists = script == "compare" or "-m" in arguments
    arguments = [one for one in arguments if not one.startswith("-")]
    if script == "compare":
        arguments = [one for one in arguments if one.partition("=")[0] not in COMPARE_SETTINGS]
        arguments = ["strategy=ddp,gqsgd" if one == "strategy=all" else one for one in arguments]
    chosen = []
    for override in OverridesParser.create().parse_overrides(arguments):
        name = override.key_or_group
        values = list(override.sweep_string_iterator()) if override.is_sweep_override() else []
        assert lists or not values, f"recipes/run.py takes one value: {override.input_line}"
        chosen.append(f"{override.get_key_element()}={values[0]}" if values else override.input_line)
        if name == "strategy":
            assert set(values) <= set(strategies())
        elif (ROOT / "conf" / name).is_dir():
            assert not [value for value in values if not (ROOT / "conf" / name / f"{value}.yaml").is_file()]
        if override.is_add() and name.startswith("strategy."):
            assert name.removeprefix("strategy.") in GQSGDConfig.field_names()
    compose_configuration(chosen)


@pytest.mark.parametrize("arguments", quoted("python -m netlab"), ids=" ".join)
def test_netlab_has_the_options(arguments: list[str]) -> None:
    source = (ROOT / "netlab" / "__main__.py").read_text()
    assert not [word for word in arguments if word.startswith("--") and f'"{word}"' not in source]


@pytest.mark.parametrize(
    "words", [words for words in QUOTED if words[0].startswith("python -m benchmarks.")], ids=" ".join
)
def test_benchmarks_have_the_options(words: tuple[str, ...]) -> None:
    files = {path.stem: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    source = files[words[0].rpartition(".")[2]]
    source += "".join(text for name, text in files.items() if re.search(rf"from benchmarks\.{name} import", source))
    options = {one.partition("=")[0] for one in words[1:] if one.startswith("--")}
    assert not [one for one in options if f'"{one}"' not in source]
