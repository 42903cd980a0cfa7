"""Every file in examples/, by the command in its docstring."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.fsdp

from tests.distributed.test_elastic import lighthouse  # noqa: F401

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
OF_MEMBERS = ROOT / "examples" / "elastic.py"
PROGRAMS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
}
MAX_LINES = 40


def command_of(example: Path) -> list[str]:
    """The last line of the docstring, with this interpreter."""
    docstring = ast.get_docstring(ast.parse(example.read_text()))
    assert docstring, f"{example} has no docstring"
    words = shlex.split(docstring.splitlines()[-1])
    start = next(number for number, word in enumerate(words) if word in PROGRAMS)  # behind environment variables
    return ["env", *words[:start], *PROGRAMS[words[start]], *words[start + 1 :]]


def test_examples_are_short() -> None:
    assert not [example.name for example in EXAMPLES if len(example.read_text().splitlines()) > MAX_LINES]


@pytest.mark.slow  # each imports torch, and most of them a framework, in every process
@pytest.mark.parametrize("example", [path for path in EXAMPLES if path != OF_MEMBERS], ids=lambda path: path.stem)
def test_example(example: Path) -> None:
    shards = "fully_shard" in example.read_text() or "ModelParallelStrategy" in example.read_text()
    if shards and not hasattr(torch.distributed.fsdp.FSDPModule, "set_custom_reduce_scatter"):
        pytest.skip("FSDP2 before torch 2.9 averages by what Gloo does not have")
    if "from ray" in example.read_text():
        pytest.importorskip("ray", reason="needs the extra ray")
    before = set(ROOT.iterdir())
    done = subprocess.run(command_of(example), capture_output=True, text=True, timeout=250, check=False, cwd=ROOT)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert re.search(r"gqsgd: [\d,]+ (?:gradient )?values in .* over 2 (?:ranks|replicas|shards)", output), output
    accuracies = re.findall(r"accuracy\W{1,4}(0\.\d+)", output)
    assert not accuracies or float(accuracies[-1]) > 0.8, output
    assert set(ROOT.iterdir()) == before, "an example leaves files behind"


@pytest.mark.slow
def test_the_example_of_restarts_begins_anew_in_a_second_run_of_one_name(tmp_path: Path) -> None:
    *command, script = command_of(ROOT / "examples" / "ddp_restarts.py")
    command.remove("--standalone")  # it makes a new name for each run
    command.insert(1, f"TMPDIR={tmp_path}")  # behind env
    named = [*command, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "one", script]
    for _ in range(2):
        done = subprocess.run(named, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert "attempt 0, rank 0, from step 0 on" in done.stdout
        assert "attempt 1, rank 0, from step 100 on" in done.stdout


@pytest.mark.slow
def test_example_of_members(lighthouse: str) -> None:  # noqa: F811
    command = [word.replace("HOST:29510", lighthouse) for word in command_of(OF_MEMBERS)]
    members = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)]
    try:
        outputs = [member.communicate(timeout=250)[0] for member in members]
    finally:
        for member in members:
            member.kill()
    for member, output in zip(members, outputs, strict=True):
        assert member.returncode == 0, output
        assert "2 members" in output
        assert float(re.findall(r"accuracy (0\.\d+)", output)[-1]) > 0.8, output
