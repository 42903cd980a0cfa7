"""Members of an elastic training, for its tests: what each of their processes does."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_gqsgd import CollectiveError, ConfigError, LocalSteps
from lightning_gqsgd.membership.members import Request, RowsOfAll
from tests.distributed.local_models import bits_of_model
from tests.distributed.ranks import logged
from tests.distributed.test_merges import network, train_step
from tests.errors import error_text

SECOND = timedelta(seconds=1)


def member(rank: int, lighthouse: str, *, is_frozen: bool = False, **fields: Any) -> tuple[nn.Module, LocalSteps]:
    """A model and its optimizer, once it has joined; ``is_frozen``: with a first layer that is not trained."""
    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse
    torch.set_num_threads(1)
    model = network(rank)
    model[0].requires_grad_(not is_frozen)
    given = {"every": "400ms", "bits": 4, "elastic": True, **fields}
    return model, LocalSteps(model, torch.optim.AdamW(model.parameters(), 1e-2), **given)


def finished(model: nn.Module, optimizer: LocalSteps) -> dict[str, Any]:
    """What a member has after its last merge. The others may leave meanwhile, so failures are those of before."""
    failed = optimizer.averages.failed
    optimizer.finish()
    result = {
        "bits": bits_of_model(model),
        "samples": optimizer.samples,
        "steps": optimizer.averages.step,
        "failed": failed,
    }
    optimizer.close()
    return result


def lighthouse_command(address: str, *options: str) -> list[str]:
    """The command of a lighthouse at an address, in a process of its own."""
    return [sys.executable, "-m", "lightning_gqsgd.cli", "lighthouse", "--bind", address, *options]


def wait_for(condition: Callable[[], bool], seconds: float = 100) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("nobody has come")
        time.sleep(0.02)


def short_training(rank: int, lighthouse: str) -> dict[str, Any]:
    """Makes three steps of rounds of an hour, once it has met the other member."""
    model, optimizer = member(rank, lighthouse, every="1h", delay=1, min_replicas=2)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        train_step(model, optimizer, generator, 0.02)
    optimizer.finish()
    result = {"bits": bits_of_model(model), "samples": optimizer.samples, "members": optimizer.averages.world_size}
    optimizer.close()
    return result


def _one_of_two(rank: int, lighthouse: str, folder: Path) -> tuple[nn.Module, LocalSteps, torch.Generator]:
    """A member that has trained until both knew of each other, with its source of batches."""
    model, optimizer = member(rank, lighthouse)
    generator = torch.Generator().manual_seed(rank)
    while optimizer.averages.world_size < 2:
        train_step(model, optimizer, generator, 0.02)
    (folder / f"both{rank}").touch()
    wait_for(lambda: all((folder / f"both{number}").exists() for number in range(2)))
    return model, optimizer, generator


def no_more_data(rank: int, lighthouse: str, folder: Path) -> dict[str, Any]:
    """Member 1 makes no step after it has finished, while member 0 makes three. Both finish again."""
    model, optimizer, generator = _one_of_two(rank, lighthouse, folder)
    optimizer.finish()
    before = optimizer.samples
    for _ in range(0 if rank else 3):
        train_step(model, optimizer, generator, 0.02)
    result = finished(model, optimizer)
    return {**result, "more": result["samples"] - before}


def death_and_newcomer(rank: int, lighthouse: str, folder: Path, delay: int) -> dict[str, Any]:
    """Member 1 dies without a word once it has merged with member 0; member 2 joins after that."""
    if rank == 2:
        wait_for(lambda: (folder / "dead").exists())
    model, optimizer = member(rank, lighthouse, delay=delay)
    generator = torch.Generator().manual_seed(rank)
    joined_with = optimizer.samples
    while not (folder / "over").exists():
        train_step(model, optimizer, generator, 0.02)
        enough = optimizer.averages.world_size == 2 and optimizer.samples > joined_with + 40
        if rank == 1 and enough:
            (folder / "dead").touch()
            os._exit(0)
        if rank == 2 and enough:
            (folder / "over").touch()
    return {**finished(model, optimizer), "joined with": joined_with}


def death_in_a_merge(rank: int, lighthouse: str, folder: Path) -> dict[str, Any]:
    """Member 1 of four dies when the others wait for its rows, with a timeout of an hour."""
    from lightning_gqsgd.membership.manager import TorchftMembers

    model, optimizer = member(rank, lighthouse, timeout=timedelta(hours=1))
    if rank == 1:
        answer = TorchftMembers.answer

        def dies(self: TorchftMembers, request: Request) -> Any:
            if isinstance(request, RowsOfAll) and optimizer.averages.world_size == 4:
                (folder / "dead").touch()
                os._exit(0)
            return answer(self, request)

        pytest.MonkeyPatch().setattr(TorchftMembers, "answer", dies)
    generator = torch.Generator().manual_seed(rank)
    # A merge of four may be over and another one before a step of a busy machine ends, so that nobody sees it here.
    while not (folder / "dead").exists() or optimizer.averages.world_size != 3:
        train_step(model, optimizer, generator, 0.02)
    return finished(model, optimizer)


def notice(rank: int, lighthouse: str, folder: Path) -> dict[str, Any]:
    """Member 1 gets SIGTERM in the middle, merges, and leaves; member 0 goes on."""
    model, optimizer = member(rank, lighthouse)
    generator = torch.Generator().manual_seed(rank)
    exits = None
    steps = 0
    try:
        while optimizer.averages.world_size < 2:
            train_step(model, optimizer, generator, 0.02)
            steps += 1
        (folder / f"both{rank}").touch()
        for number in range(60):
            if rank and number == 10:
                os.kill(os.getpid(), signal.SIGTERM)
            train_step(model, optimizer, generator, 0.02)
            steps += 1
    except SystemExit as exit:
        exits = exit.code
        steps += 1  # the step that has left
    if exits is None:
        optimizer.finish()
    samples = optimizer.averages.samples
    if exits is None:
        optimizer.close()
    return {"exits": exits, "samples": samples, "steps": steps}


def changed_without_steps(rank: int, lighthouse: str, folder: Path) -> bool:
    """A callback has set other weights since the latest merge, and the member leaves before its next step."""
    model, optimizer = member(rank, lighthouse)
    generator = torch.Generator().manual_seed(rank)
    train_step(model, optimizer, generator, 0.0)
    while optimizer.averages._steps_since:
        train_step(model, optimizer, generator, 0.02)
    before = optimizer.averages.averages
    with torch.no_grad():
        model[0].weight += 1
    optimizer.leave()
    anchor = optimizer.state_dict()["local_steps"]["merged"]["anchors"]["0.weight"]
    close = torch.allclose(anchor, model[0].weight, atol=0.1)  # the change was quantised
    return close and optimizer.averages.averages > before


def strangers(
    rank: int, lighthouse: str, folder: Path, fields: dict[str, Any], at_once: bool = False, is_frozen: bool = False
) -> dict[str, Any]:
    """Member 1 has other options, or other frozen weights, and is not let in; member 0 goes on as if nothing had been.

    If they come at once, member 1 does not see member 0 at the door.
    """
    if rank == 0:
        model, optimizer = member(0, lighthouse, is_frozen=is_frozen)
        generator = torch.Generator().manual_seed(0)
        (folder / "inside").touch()
        while not (folder / "refused").exists():
            train_step(model, optimizer, generator, 0.01)
        return finished(model, optimizer)
    wait_for(lambda: (folder / "inside").exists())
    if at_once:
        pytest.MonkeyPatch().setattr("lightning_gqsgd.membership.manager.check_others", lambda *_: [])
    text = error_text(ConfigError, member, 1, lighthouse, is_frozen=is_frozen, **fields)
    (folder / "refused").touch()
    return {"error": text}


def unreachable(rank: int, address: str | None) -> str:
    """What is said without a lighthouse."""
    os.environ.pop("TORCHFT_LIGHTHOUSE", None)
    if address is not None:
        os.environ["TORCHFT_LIGHTHOUSE"] = address
    model = network(rank)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    return error_text(ConfigError, LocalSteps, model, inner, every="1s", bits=4, elastic=True, timeout=SECOND)


def early(rank: int, address: str, folder: Path) -> int:
    """Joins although the lighthouse starts a few seconds later."""
    (folder / "waits").touch()
    _, optimizer = member(rank, address)
    merges = optimizer.averages.averages
    optimizer.close()
    return merges


def between_merges(rank: int, lighthouse: str, folder: Path) -> dict[str, Any]:
    """Member 1 comes when member 0 has just begun a round of an hour, and trains."""
    if rank:
        wait_for((folder / "round").exists)
    model, optimizer = member(rank, lighthouse, every="1h", delay=1)
    start = bits_of_model(model)
    (folder / "round").touch()
    if rank == 0:
        wait_for((folder / "trained").exists)
    else:
        for _ in range(3):
            train_step(model, optimizer, torch.Generator().manual_seed(0))
        (folder / "trained").touch()
    result = {
        "start": start,
        "merges": optimizer.averages.averages,
        "steps": optimizer.averages.step,
        "report": optimizer.averages.report(),
    }
    optimizer.close()
    return result


def compiling(rank: int, lighthouse: str, folder: Path) -> dict[str, Any]:
    """Member 1 comes when member 0 has merged, and its kernels are compiled once it has made three steps."""
    from lightning_gqsgd.membership.process_group import QuantisedProcessGroup

    if rank:
        wait_for((folder / "merged").exists)
        compile_for = QuantisedProcessGroup.compile_for

        def compile_late(self: QuantisedProcessGroup, most_ranks: int) -> None:
            wait_for((folder / "trained").exists)
            compile_for(self, most_ranks)

        pytest.MonkeyPatch().setattr(QuantisedProcessGroup, "compile_for", compile_late)
    model, optimizer = member(rank, lighthouse, delay=1)
    (folder / "merged").touch()
    generator = torch.Generator().manual_seed(rank)
    while optimizer.averages.world_size < 2:
        train_step(model, optimizer, generator, 0.02)
        if rank and optimizer.averages.step == 3:
            (folder / "trained").touch()
    return finished(model, optimizer)


def without_a_lighthouse_for_a_while(rank: int, address: str, folder: Path) -> dict[str, Any]:
    """Trains until merges go on after the lighthouse was killed and started again."""
    model, optimizer = member(rank, address, delay=1)
    generator = torch.Generator().manual_seed(rank)
    before = None
    # One that calls the new lighthouse before the other one does merges alone for a while.
    while before is None or optimizer.averages.averages < before + 3 or optimizer.averages.world_size < 2:
        train_step(model, optimizer, generator, 0.02)
        if optimizer.averages.world_size == 2:
            (folder / f"merges{rank}").touch()
        if before is None and (folder / "again").exists():
            before = optimizer.averages.averages + 1  # one may be under way
    return finished(model, optimizer)


def notice_without_a_lighthouse(rank: int, address: str, folder: Path, delay: int, steps: int) -> dict[str, Any]:
    """Gets SIGTERM when the lighthouse has gone, in a step or when it waits for a merge, and leaves without one."""
    said = logged()
    model, optimizer = member(rank, address, timeout=SECOND, delay=delay)
    generator = torch.Generator().manual_seed(rank)
    (folder / "merges").touch()
    wait_for((folder / "gone").exists)
    exits = None
    threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    try:
        for _ in range(steps):
            train_step(model, optimizer, generator, 0.1)
        optimizer.finish()
    except SystemExit as exit:
        exits = exit.code
    return {"exits": exits, "said": said}


def after_the_end(rank: int, lighthouse: str, folder: Path) -> list[Any]:
    """Member 0 trains, and is gone when member 1 comes."""
    said = logged()
    if rank:
        wait_for((folder / "over").exists)
    model, optimizer = member(rank, lighthouse, timeout=SECOND)
    generator = torch.Generator().manual_seed(rank)
    merges = optimizer.averages.averages
    while optimizer.averages.averages < 3:
        train_step(model, optimizer, generator, 0.02)
    optimizer.close()
    (folder / "over").touch()
    return [merges, [text for text in said if "a new training begins" in text]]


def suspended(rank: int, lighthouse: str, folder: Path, further: int) -> list[str]:
    """Member 1 is stopped, and goes on when member 0 has made a merge and ``further`` ones, and left. Returns what it
    says of that."""
    said = logged()
    pytest.MonkeyPatch().setattr("lightning_gqsgd.membership.manager._LOOK_AFTER", SECOND)
    model, optimizer = member(rank, lighthouse, timeout=3 * SECOND)
    generator = torch.Generator().manual_seed(rank)
    while optimizer.averages.world_size < 2:
        train_step(model, optimizer, generator, 0.02)
    if rank:
        _stop_until((folder / "gone").exists)
    else:
        while optimizer.averages.world_size == 2:
            train_step(model, optimizer, generator, 0.02)
        enough = optimizer.averages.averages + further
        while optimizer.averages.averages < enough:
            train_step(model, optimizer, generator, 0.02)
        optimizer.close()
        (folder / "gone").touch()
        return []
    merges = optimizer.averages.averages
    while optimizer.averages.averages < merges + 2:
        train_step(model, optimizer, generator, 0.02)
    optimizer.close()
    return [text for text in said if "none of its members is left" in text]


def stands_still(rank: int, lighthouse: str, folder: Path) -> dict[str, Any]:
    """Member 1 makes no steps, perhaps after an error, until member 0 has finished without it. Then it goes on."""
    said = logged()
    pytest.MonkeyPatch().setattr("lightning_gqsgd.local_steps.merges.rounds._PATIENCE_S", 3.0)
    model, optimizer, generator = _one_of_two(rank, lighthouse, folder)
    if rank:
        wait_for((folder / "over").exists)
        alone = optimizer.samples
        for _ in range(5):
            train_step(model, optimizer, generator, 0.02)
        result = finished(model, optimizer)
        return {**result, "alone": result["samples"] - alone, "said": said}
    result = finished(model, optimizer)
    (folder / "over").touch()
    return {**result, "said": said}


def _stop_until(condition: Callable[[], bool]) -> None:
    """Stop this process until something is so."""
    own = os.getpid()
    if os.fork() == 0:
        os.kill(own, signal.SIGSTOP)
        wait_for(condition)
        os.kill(own, signal.SIGCONT)
        os._exit(0)
    os.wait()


def too_few(rank: int, lighthouse: str) -> dict[str, Any]:
    """What a member says and hears that is alone, and may not be."""
    said = logged()
    patch = pytest.MonkeyPatch()
    patch.setattr("lightning_gqsgd.local_steps.merges.rounds._PATIENCE_S", 1.0)
    patch.setattr("lightning_gqsgd.local_steps.merges.thread._SAY_AFTER_S", 0.5)
    return {"error": error_text(CollectiveError, member, rank, lighthouse, min_replicas=2), "said": said}


def too_few_for_a_lighthouse(rank: int, lighthouse: str) -> dict[str, Any]:
    """What a member says and hears that is alone at a lighthouse for two."""
    said = logged()
    patch = pytest.MonkeyPatch()
    patch.setattr("lightning_gqsgd.local_steps.merges.rounds._PATIENCE_S", 2.0)
    patch.setattr("lightning_gqsgd.membership.manager._LOOK_AFTER", SECOND / 2)
    return {"error": error_text(CollectiveError, member, rank, lighthouse), "said": said}
