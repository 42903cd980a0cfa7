"""The README's examples, as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.mark.parametrize(
    ("launcher", "content", "output"),
    [
        ([sys.executable], "Trainer(strategy=", "gqsgd: 8,192 gradient values in 1 tensor at 8 bits"),
        ([sys.executable], "simulate(preset", "ecq_sgd "),
        (TORCHRUN, "register_gqsgd", "65,536 gradient values in 1 tensor at 4 bits"),
    ],
)
def test_example(launcher: list[str], content: str, output: str, tmp_path: Path) -> None:
    (example,) = (one for one in EXAMPLES if content in one)
    file = tmp_path / "example.py"
    file.write_text(example)
    done = subprocess.run(
        [*launcher, str(file)], capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert output in done.stdout + done.stderr


def test_there_are_no_other_examples() -> None:
    assert len(EXAMPLES) == 3
