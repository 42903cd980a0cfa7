"""Continuous integration runs the slow tests that a change touches."""

from __future__ import annotations

import pytest

from tests import touched


@pytest.mark.parametrize(
    ("changed", "test", "runs"),
    [
        ("recipes/run.py", "tests/recipes/test_run.py::test_a", True),
        ("conf/exp/quickstart.yaml", "tests/recipes/test_run.py::test_a", True),
        ("tests/recipes/test_run.py", "tests/recipes/test_run.py::test_a[x-y]", True),
        ("tests/recipes/test_text.py", "tests/recipes/test_run.py::test_a", False),
        ("docs/index.md", "tests/recipes/test_run.py::test_a", False),
        ("README.md", "tests/integrations/test_readme.py::test_example", True),
        ("lightning_gqsgd/frameworks/fabric.py", "tests/integrations/test_lightning.py::test_a", True),
        ("lightning_gqsgd/session/copies.py", "tests/distributed/test_plain.py::test_a", True),
        ("lightning_gqsgd/session/copies.py", "tests/distributed/test_staging.py::test_a", False),
        ("lightning_gqsgd/codecs/linear/codec.py", "tests/statistics/test_systems.py::test_a", True),
    ],
)
def test_a_slow_test_runs_when_its_file_or_its_subject_changed(changed: str, test: str, runs: bool) -> None:
    assert touched.touches(["LICENSE", changed], test) is runs


def test_every_subject_and_every_file_of_tests_exists() -> None:
    for start, paths in touched.SUBJECTS.items():
        for name in (start, *paths):
            assert list(touched.ROOT.glob(f"{name.rstrip('/')}*")), name


def test_every_file_with_slow_tests_has_a_subject() -> None:
    tests = touched.ROOT / "tests"
    slow = [file for file in tests.rglob("test_*.py") if "pytest.mark.slow" in file.read_text()]
    names = [file.relative_to(touched.ROOT).as_posix() for file in slow]
    assert len(names) > 50
    assert [name for name in names if not name.startswith(tuple(touched.SUBJECTS))] == []


def test_changed_files_come_first_and_the_others_in_an_order_of_each_commit() -> None:
    files = [f"tests/test_{letter}.py" for letter in "abcdefgh"]
    orders = [sorted(files, key=lambda file: touched.place(file, [files[5]], commit)) for commit in ("1f", "2e")]
    assert orders[0] != orders[1]
    assert {order[0] for order in orders} == {files[5]}


def test_an_unknown_commit_is_an_error_that_names_it() -> None:
    with pytest.raises(pytest.UsageError, match="git diff --name-only no-such-commit --: fatal"):
        touched.changed_since("no-such-commit")
