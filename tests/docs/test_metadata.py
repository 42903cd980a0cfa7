"""What several files say of the package: its version, its date, and what the first page of the site is called."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from packaging.markers import Marker
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

from lightning_gqsgd import __version__

ROOT = Path(__file__).resolve().parents[2]
LOCK = (ROOT / "uv.lock").read_text()
#: The versions of Python, 3.x, for which there is a torch.
OF_TORCH = sorted({int(minor) for minor in re.findall(r"/torch-[\d.]+-cp3(\d+)-", LOCK)})
CITATION: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_the_citation_is_of_this_version() -> None:
    assert CITATION["version"] == __version__


def test_the_citation_has_the_date_that_the_changelog_has_for_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    heading = re.search(rf"^## {re.escape(__version__)}(?: - (\d{{4}}-\d\d-\d\d))?$", changelog, re.MULTILINE)
    assert heading, f"CHANGELOG.md has no heading of version {__version__}"
    released = CITATION.get("date-released")
    assert (None if released is None else str(released)) == heading[1]


def test_every_python_that_is_named_is_allowed() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    named = [int(minor) for minor in re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', text)]
    assert re.search(r'requires-python = ">=3\.(\d+)"', text)[1] == str(min(named))  # type: ignore[index]
    assert named == list(range(min(named), max(named) + 1))


@pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv")
@pytest.mark.parametrize("minor", OF_TORCH)
def test_uv_sync_finds_a_file_of_every_package_wherever_torch_has_one(minor: int) -> None:
    export = ["uv", "export", "--frozen", "--offline", "--no-hashes", "--no-emit-project", "--no-annotate", "--quiet"]
    exported = subprocess.run(export, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    pairs = [line.partition(" ; ")[::2] for line in exported.splitlines() if "==" in line]
    machine = {"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.1"}
    machine |= {"sys_platform": "linux", "platform_machine": "x86_64"}
    wanted = {pinned for pinned, marker in pairs if not marker or Marker(marker).evaluate(machine)}
    platforms = ["manylinux2014_x86_64", *(f"manylinux_2_{glibc}_x86_64" for glibc in range(5, 29))]
    tags = {*cpython_tags((3, minor), platforms=platforms), *compatible_tags((3, minor), platforms=platforms)}
    absent = []
    locked = re.findall(r'name = "(.+)"\nversion = "(.+)"\n((?:.+\n)*)', LOCK)
    for name, version, rest in locked:
        wheels = re.findall(r'url = "[^"]*/([^"/]+\.whl)"', rest)
        has_file = "\nsdist = " in rest or any(parse_wheel_filename(wheel)[3] & tags for wheel in wheels)
        if f"{name}=={version}" in wanted and not has_file:
            absent.append(name)
    assert not absent, f"Python 3.{minor} cannot have {absent}; leave them out there, in pyproject.toml"


def test_the_first_page_is_named_after_the_package_and_ends_with_its_version() -> None:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "_site" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    index = (ROOT / "docs" / "index.md").read_text()
    page: Any = SimpleNamespace(file=SimpleNamespace(generated_by=None, src_uri="index.md"))
    lines = hooks.on_page_markdown(index, page, None, None).rstrip().split("\n")
    assert lines[0] == "# lightning-gqsgd"
    assert lines[-1] == f"This page is of version {__version__}."
    assert [line for line in lines[:-1] if __version__ in line] == []
