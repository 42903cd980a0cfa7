"""Accelerate's own test scripts, which its package contains: what passes without a hook passes with ours.

The scripts assert for themselves: `test_script` compares the weights of one process and of several after a training,
`test_sync` the gradients with and without synchronisation, accumulation and schedulers. Both ask for equal fp32
numbers. Their models have two parameters of one number each, which the hook sends whole. Accelerate joins uneven inputs
on GPUs only; `tests/integrations/test_loops.py` does so on CPUs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import itertools
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed

from lightning_gqsgd import GQSGDKwargs
from tests.distributed.ranks import run
from tests.reliability.knobs import SEED

SCRIPTS = "accelerate.test_utils.scripts"
#: How `Accelerator`s get a hook.
METHODS: dict[str, Callable[[], DistributedDataParallelKwargs]] = {
    "plain": DistributedDataParallelKwargs,
    "native": lambda: GQSGDKwargs(reducer="native"),
    "8 bit": GQSGDKwargs,
}
OPTIONS = [*itertools.product([True, False], repeat=3)]


def _training(script: ModuleType) -> Iterator[tuple[str, Callable[[], Any]]]:
    script.Accelerator()
    yield "all of test_script", script.main


def _sync(script: ModuleType) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The script has the cases of GPUs left out on CPUs, where they work as well."""
    accelerator = script.Accelerator()
    yield "a loader that is left", script.test_dataloader_break
    yield "no_sync", lambda: script.test_distributed_sync(accelerator)
    yield "no_sync, several forward passes", lambda: script.test_distributed_sync_multiple_fwd(accelerator)
    for options in OPTIONS:
        yield f"accumulation {options}", functools.partial(script.test_gradient_accumulation, *options)
        scheduled = functools.partial(script.test_gradient_accumulation_with_opt_and_scheduler, *options)
        yield f"accumulation with a scheduler {options}", scheduled


CASES: dict[str, Callable[[ModuleType], Iterator[tuple[str, Callable[[], Any]]]]] = {
    "test_sync": _sync,
    "test_script": _training,
}


def _outcomes(_: int) -> dict[str, dict[str, str]]:
    """By method and case: what it raised, or nothing."""
    os.environ["OMP_NUM_THREADS"] = "1"
    warnings.simplefilter("ignore")
    found: dict[str, dict[str, str]] = {}
    for method, make in METHODS.items():
        found[method] = {}
        for name, cases in CASES.items():
            AcceleratorState._reset_state()
            GradientState._reset_state()
            script = importlib.import_module(f"{SCRIPTS}.{name}")
            with (
                mock.patch.object(script, "Accelerator", functools.partial(_made, make)),
                mock.patch.object(AcceleratorState, "destroy_process_group"),
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                for case, call in cases(script):
                    found[method][case] = _outcome(call)
    return found


def _made(make: Callable[[], DistributedDataParallelKwargs], *args: Any, **options: Any) -> Accelerator:
    return Accelerator(*args, cpu=True, kwargs_handlers=[make()], **options)


def _outcome(call: Callable[[], Any]) -> str:
    set_seed(SEED)  # some cases draw weights that fail without a hook, too
    try:
        call()
    except Exception:  # it is the result
        return traceback.format_exc(limit=-4)
    return ""


@pytest.mark.reliability
def test_what_passes_without_a_hook_passes_with_ours(tmp_path: Path) -> None:
    first, second = run(_outcomes, 2, tmp_path, timeout=280, initialise=False)
    passing = [case for case, error in first["plain"].items() if not error and not second["plain"][case]]
    print(f"{len(passing)} of {len(first['plain'])} cases pass without a hook")
    assert len(passing) >= 15
    for method, case in itertools.product(METHODS, passing):
        error = first[method][case] or second[method][case]
        assert not error, f"{method}, {case}:\n{error}"
