"""Which slow tests a change touches, and how long they may take: what continuous integration runs of them.

``pytest -m slow --touched-since main --slow-seconds 420`` runs the slow tests whose own file, or whose subject (see
`SUBJECTS`), differs between ``main`` and the files here. After 420 seconds it starts no other, and says which were
left. Tests whose own file differs are first. The others have another order after each commit, so that no test is always
among those that are left.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: What each folder or file of tests is about: paths from the root, and any path that starts like them.
SUBJECTS: dict[str, tuple[str, ...]] = {
    "tests/recipes/": ("recipes/", "conf/", "workloads/", "pictures/", "netlab/"),
    "tests/recipes/test_arguments.py": ("lightning_gqsgd/presets",),
    "tests/recipes/test_config.py": ("lightning_gqsgd/presets",),
    "tests/distributed/test_benchmarks.py": ("benchmarks/", "workloads/", "pictures/"),
    "tests/distributed/test_netlab.py": ("netlab/",),
    "tests/distributed/test_probe.py": ("lightning_gqsgd/predict/", "lightning_gqsgd/cli/"),
    "tests/distributed/test_auto.py": ("lightning_gqsgd/adaptive/", "lightning_gqsgd/predict/"),
    "tests/distributed/test_copies.py": (
        "lightning_gqsgd/session/copies",
        "lightning_gqsgd/adaptive/",
        "lightning_gqsgd/sparse/",
    ),
    "tests/distributed/test_distributed_checkpoint.py": (
        "lightning_gqsgd/session/checkpoint",
        "lightning_gqsgd/frameworks/",
    ),
    "tests/distributed/test_doctor_nodes.py": (
        "lightning_gqsgd/cli/doctor",
        "lightning_gqsgd/cli/ranks",
        "lightning_gqsgd/predict/",
    ),
    "tests/distributed/test_elastic.py": ("lightning_gqsgd/membership/", "lightning_gqsgd/local_steps/merges/"),
    "tests/distributed/test_functional.py": ("lightning_gqsgd/ddp/functional", "lightning_gqsgd/reducers/"),
    "tests/distributed/test_local": ("lightning_gqsgd/local_steps/",),
    "tests/distributed/test_plain.py": ("lightning_gqsgd/adaptive/", "lightning_gqsgd/session/copies"),
    "tests/distributed/test_presets.py": ("lightning_gqsgd/spec/", "lightning_gqsgd/presets"),
    "tests/distributed/test_random_changes.py": ("lightning_gqsgd/frameworks/",),
    "tests/distributed/test_simulated_gpu.py": (
        "lightning_gqsgd/wire/",
        "lightning_gqsgd/ddp/",
        "lightning_gqsgd/reducers/",
        "lightning_gqsgd/local_steps/",
        "lightning_gqsgd/frameworks/fsdp",
        "lightning_gqsgd/kernels/cuda/",
    ),
    "tests/distributed/test_sparse.py": ("lightning_gqsgd/sparse/", "lightning_gqsgd/session/copies"),
    "tests/distributed/test_virtual_world.py": ("lightning_gqsgd/membership/", "lightning_gqsgd/local_steps/merges/"),
    "tests/distributed/": ("lightning_gqsgd/wire/engine", "lightning_gqsgd/ddp/", "lightning_gqsgd/wire/"),
    "tests/reliability/test_every_reducer.py": ("lightning_gqsgd/reducers/", "lightning_gqsgd/codecs/"),
    "tests/reliability/": ("lightning_gqsgd/wire/engine", "lightning_gqsgd/ddp/", "lightning_gqsgd/wire/"),
    "tests/docs/": ("docs/", "README.md"),
    "tests/docs/test_extending.py": ("lightning_gqsgd/kernels/", "lightning_gqsgd/codecs/"),
    "tests/docs/test_site.py": ("conf/", "recipes/"),
    "tests/docs/test_terminal.py": ("lightning_gqsgd/predict/", "lightning_gqsgd/cli/advising"),
    "tests/gpu/": ("lightning_gqsgd/kernels/", "lightning_gqsgd/codecs/"),
    "tests/integrations/test_averaging.py": ("lightning_gqsgd/local_steps/", "lightning_gqsgd/frameworks/"),
    "tests/integrations/test_elastic": (
        "lightning_gqsgd/membership/",
        "lightning_gqsgd/local_steps/merges/",
        "lightning_gqsgd/frameworks/",
    ),
    "tests/integrations/test_examples.py": ("examples/",),
    "tests/integrations/test_local_sharded.py": ("lightning_gqsgd/local_steps/",),
    "tests/integrations/test_local_steps.py": ("lightning_gqsgd/local_steps/", "lightning_gqsgd/frameworks/"),
    "tests/integrations/test_plain.py": ("lightning_gqsgd/adaptive/", "lightning_gqsgd/frameworks/"),
    "tests/integrations/test_ray.py": ("lightning_gqsgd/frameworks/ray",),
    "tests/integrations/test_sparse.py": ("lightning_gqsgd/sparse/",),
    "tests/integrations/test_readme.py": ("README.md", "docs/api/simulate.md"),
    **{
        f"tests/integrations/test_{part}.py": ("lightning_gqsgd/ddp/", "lightning_gqsgd/frameworks/")
        for part in ("finetuning", "loops", "peft", "precision", "resume")
    },
    "tests/integrations/test_fsdp_all_gather": (
        "lightning_gqsgd/frameworks/fsdp",
        "lightning_gqsgd/reducers/shards",
        "lightning_gqsgd/wire/plan",
    ),
    "tests/integrations/test_fsdp": (
        "lightning_gqsgd/frameworks/fsdp",
        "lightning_gqsgd/reducers/shards",
        "lightning_gqsgd/wire/engine",
    ),
    "tests/integrations/test_transformers_fsdp.py": (
        "lightning_gqsgd/frameworks/transformers",
        "lightning_gqsgd/frameworks/fsdp",
    ),
    "tests/integrations/test_transformers.py": ("lightning_gqsgd/frameworks/transformers", "lightning_gqsgd/ddp/"),
    "tests/integrations/test_lightning": ("lightning_gqsgd/_autoload", "lightning_gqsgd/frameworks/"),
    "tests/integrations/test_fabric.py": ("lightning_gqsgd/frameworks/fabric",),
    "tests/integrations/test_accelerate.py": ("lightning_gqsgd/frameworks/accelerate",),
    "tests/statistics/": ("lightning_gqsgd/codecs/", "lightning_gqsgd/reducers/"),
    "tests/unit/test_advice_sentence.py": ("lightning_gqsgd/predict/", "lightning_gqsgd/cli/advising"),
    "tests/unit/test_benchmark_avx2.py": ("benchmarks/avx2", "benchmarks/reducers"),
    "tests/unit/test_benchmark_elastic_losses.py": ("benchmarks/elastic_losses", "benchmarks/virtual_members"),
    "tests/unit/test_benchmark_fine_tuning.py": ("benchmarks/fine_tuning", "benchmarks/kept"),
    "tests/unit/test_bunches.py": ("lightning_gqsgd/predict/",),
    "tests/unit/test_gpu_day.py": ("benchmarks/gpu_day",),
    "tests/unit/test_cli_systems.py": (
        "lightning_gqsgd/research/",
        "lightning_gqsgd/reducers/",
        "lightning_gqsgd/local_steps/",
    ),
    "tests/unit/test_compiling.py": ("lightning_gqsgd/cli/warming", "lightning_gqsgd/wire/"),
    "tests/unit/test_cuda_kernels": (
        "lightning_gqsgd/kernels/",
        "lightning_gqsgd/wire/compiling",
        "lightning_gqsgd/wire/plan",
    ),
    "tests/unit/test_levels.py": ("lightning_gqsgd/predict/",),
    "tests/unit/test_races.py": ("lightning_gqsgd/wire/", "lightning_gqsgd/reducers/", "lightning_gqsgd/kernels/"),
    "tests/unit/test_scatter.py": ("lightning_gqsgd/reducers/", "lightning_gqsgd/wire/plan"),
    "tests/unit/test_pieces.py": ("lightning_gqsgd/predict/",),
    "tests/unit/": ("lightning_gqsgd/codecs/", "lightning_gqsgd/kernels/"),
}
#: When the last slow test may start, in seconds of `time.time`: read by the processes that run tests.
_DEADLINE = "SLOW_TESTS_START_UNTIL"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("slow tests")
    group.addoption("--touched-since", metavar="COMMIT", help="run only slow tests that a change since COMMIT touches")
    group.addoption("--slow-seconds", type=float, help="start no slow test after this many seconds")


def pytest_configure(config: pytest.Config) -> None:
    seconds = config.getoption("--slow-seconds")
    if seconds is not None:  # the processes that run tests inherit it
        os.environ.setdefault(_DEADLINE, str(time.time() + seconds))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    commit = config.getoption("--touched-since")
    if commit is None:
        return
    changed = changed_since(commit)
    left_out = [item for item in items if item.get_closest_marker("slow") and not touches(changed, item.nodeid)]
    config.hook.pytest_deselected(items=left_out)
    kept = set(items) - set(left_out)
    head = last_commit()
    # Files stay together, because some have fixtures of their own. Python's sort keeps the order within a file.
    places = {file: place(file, changed, head) for file in {_file(item.nodeid) for item in items}}
    items[:] = sorted([item for item in items if item in kept], key=lambda item: places[_file(item.nodeid)])


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slow") and time.time() > float(os.environ.get(_DEADLINE, "inf")):
        pytest.skip("the time for slow tests is over (--slow-seconds); run it with `pytest -m slow`")


def changed_since(commit: str) -> list[str]:
    """Paths from the root that differ between a commit and the files here.

    Raises:
        pytest.UsageError: git does not know the commit.
    """
    return _git("diff", "--name-only", commit, "--").splitlines()


def place(file: str, changed: list[str], commit: str) -> tuple[bool, bytes]:
    """What files are sorted by: changed ones first, the others in an order that depends on a commit."""
    return file not in changed, hashlib.sha256(f"{commit} {file}".encode()).digest()


def _file(test: str) -> str:
    return test.partition("::")[0]


def last_commit() -> str:
    """The commit that is checked out."""
    return _git("rev-parse", "HEAD").strip()


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise pytest.UsageError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def touches(changed: list[str], test: str) -> bool:
    """Whether changed paths have a part in a test, which is named by its file and whatever follows."""
    file = _file(test)
    subjects = [subject for start, paths in SUBJECTS.items() if file.startswith(start) for subject in paths]
    return any(path == file or path.startswith(tuple(subjects)) for path in changed)
