"""The wheel alone, in an environment that has the dependencies and not this checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from lightning_gqsgd import __version__

ROOT = Path(__file__).resolve().parents[2]
needs_uv = pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv")


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a virtual environment with the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    _done("uv", "build", "--wheel", "--out-dir", str(folder), str(ROOT))
    (wheel,) = folder.glob("*.whl")
    venv = folder / "venv"
    _done("uv", "venv", "--python", sys.executable, str(venv))
    _done("uv", "pip", "install", "--python", str(venv), "--no-deps", "--offline", str(wheel))
    # Dependencies come from here. Of this folder, Python does not read the .pth file that adds the checkout.
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv


def _done(*command: str) -> str:
    finished = subprocess.run(
        command,
        cwd=Path(command[0]).parent if os.sep in command[0] else ROOT,
        env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@needs_uv
@pytest.mark.slow
def test_the_wheel_is_all_that_users_need(clean: Path) -> None:
    assert _done(str(clean / "bin" / "gqsgd"), "--version") == f"gqsgd {__version__}\n"
    program = "import lightning_gqsgd as package; print(package.__file__, package.GQSGDConfig(bits=4).bits)"
    file, bits = _done(str(clean / "bin" / "python"), "-c", program).split()
    assert Path(file).is_relative_to(clean)
    assert bits == "4"
    assert "lightning_gqsgd" in _done(str(clean / "bin" / "gqsgd"), "doctor")


@needs_uv
@pytest.mark.slow
def test_two_builds_have_the_same_bytes(tmp_path: Path) -> None:
    for name in ("first", "second"):
        _done("uv", "build", "--out-dir", str(tmp_path / name), str(ROOT))
        time.sleep(2)  # so that a time of writing would differ: zip files count in steps of two seconds
    first, second = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("first", "second"))
    assert {Path(name).suffix for name in first} >= {".whl", ".gz"}
    assert first == second
