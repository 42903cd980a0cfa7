"""One rank of `benchmarks.goodput`: trains until it is killed, and writes down every merge.

    python -m benchmarks.goodput_rank WAY FOLDER [--again]

With ``--again``, a process that has imported everything forks each rank: imports take longer on these hosts than a
machine is away.

A line of ``FOLDER/rank0.jsonl`` is one merge that rank 0 took part in: the machine's monotonic time, the number of the
merge, the samples of this rank that entered the merged model with it, a digest of the model's weights, and now and then
a loss.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from workloads.characters import CharacterTransformer, load_texts, windows

BATCH, LENGTH = 16, 32
#: Least seconds between two validations of a rank, which take the time of several steps.
VALIDATE_S = 2.0
#: Steps between two averages, and between two checkpoints of DDP, unless the variable says another number.
EVERY = 16
EVERY_VARIABLE = "GOODPUT_EVERY"
TIMEOUT = timedelta(seconds=10)
#: Seconds between two merges by the clock.
ROUND_S = 3.0


class Rank:
    """A model, its data, and the journal of what has entered the merged model.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.host = int(os.environ["NETLAB_HOST"])
        self.folder = folder
        self.every = int(os.environ.get(EVERY_VARIABLE, EVERY))
        torch.manual_seed(0)
        self.model = CharacterTransformer(LENGTH, layers=1, width=64, heads=2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        texts = load_texts()
        self._text = texts.train
        # A rank that starts again goes on with other windows.
        self._own = torch.Generator().manual_seed(1000 * self.host + time.monotonic_ns() % 1000)
        self._valid = windows(texts.valid, 16, LENGTH, torch.Generator().manual_seed(1))
        self._validated_at = -VALIDATE_S
        self._journal = (folder / f"rank{self.host}.jsonl").open("a", buffering=1)
        (folder / f"pid{self.host}").write_text(str(os.getpid()))

    def step(self, forward: nn.Module, optimizer: Any) -> None:
        """Make one step on windows of this rank's own."""
        inputs, targets = windows(self._text, BATCH, LENGTH, self._own)
        loss = F.cross_entropy(forward(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def merged(self, number: int, samples: int, **more: Any) -> None:
        """Write down that so many samples of this rank are in the merged model, which the model is now.

        ``more``: further entries of the line; ``entered``: samples of all ranks that are in the model, where that is
        known.
        """
        digest = hashlib.sha256(b"".join(p.numpy().tobytes() for p in self.model.parameters())).hexdigest()[:16]
        line: dict[str, Any] = {"time": time.monotonic(), "merge": number, "samples": samples, "digest": digest}
        if line["time"] >= self._validated_at + VALIDATE_S:
            self._validated_at = line["time"]
            inputs, targets = self._valid
            line["loss"] = float(F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten()))
        self._journal.write(json.dumps({**line, **more}) + "\n")

    def save(self, number: int, **parts: Any) -> None:
        """Save what the ranks start from again; never half a file."""
        file = self.folder / f"checkpoint{self.host}.pt"
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save({"number": number, **state}, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)

    def resume(self, **parts: Any) -> int:
        """Load the latest checkpoint that all ranks have; returns its number, 0 where there is none."""
        saved = self._saved(self.host)
        mine = torch.tensor([saved["number"], self.host])
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, mine)
        # A rank may have been killed before it could save: all take the weights of one with the least number.
        number, host = min(tuple(row.tolist()) for row in rows)
        chosen = self._saved(host) if number else {}
        for name, part in parts.items():
            if name in chosen:
                part.load_state_dict(chosen[name])
        dist.barrier()  # before anybody saves again
        return int(number)

    def _saved(self, host: int) -> dict[str, Any]:
        """Returns the checkpoint of a host, which all hosts of a lab see."""
        file = self.folder / f"checkpoint{host}.pt"
        saved: dict[str, Any] = torch.load(file, weights_only=True) if file.exists() else {"number": 0}
        return saved


def alone(rank: Rank) -> None:
    """Train without anybody: the speed of the host."""
    for number in range(1, sys.maxsize):
        for _ in range(rank.every):
            rank.step(rank.model, rank.optimizer)
        rank.merged(number, rank.every * BATCH)


def ddp(rank: Rank) -> None:
    """Average gradients in every step, under torchrun."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    number = rank.resume(model=rank.model, optimizer=rank.optimizer)
    wrapped = DistributedDataParallel(rank.model)
    while True:
        for _ in range(rank.every):
            rank.step(wrapped, rank.optimizer)
        number += 1
        rank.merged(number, rank.every * BATCH)
        rank.save(number, model=rank.model, optimizer=rank.optimizer)


def lock_step(rank: Rank) -> None:
    """Average models every few steps with `LocalSteps` at 4 bits, under torchrun."""
    from lightning_gqsgd import LocalSteps

    dist.init_process_group("gloo", timeout=TIMEOUT)
    optimizer = LocalSteps(rank.model, rank.optimizer, every=rank.every, preset="gqsgd_diloco")
    # Moments of AdamW and memories of the averages start anew with the ranks.
    number = rank.resume(model=rank.model)
    while True:
        for _ in range(rank.every):
            rank.step(rank.model, optimizer)
        number += 1
        rank.merged(number, rank.every * BATCH)
        rank.save(number, model=rank.model)


def torchft_diloco(rank: Rank) -> None:
    """Average models every few steps with torchft's DiLoCo in fp32."""
    import torchft

    _diloco(rank, torchft.ProcessGroupGloo(timeout=TIMEOUT))


def torchft_diloco_4bit(rank: Rank) -> None:
    """Average models every few steps with torchft's DiLoCo at 4 bits."""
    import torchft

    from lightning_gqsgd import quantised

    _diloco(rank, quantised(torchft.ProcessGroupGloo(timeout=TIMEOUT), bits=4))


def _diloco(rank: Rank, group: Any) -> None:
    """Train with torchft's Manager and DiLoCo."""
    import torchft
    from torchft.local_sgd import DiLoCo

    address = socket.gethostname()
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    outer = torch.optim.SGD(rank.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    healed: list[int] = []

    def state() -> dict[str, Any]:
        return {"model": rank.model.state_dict(), "inner": rank.optimizer.state_dict(), "outer": outer.state_dict()}

    def load(other: dict[str, Any]) -> None:
        healed.append(1)
        rank.model.load_state_dict(other["model"])
        rank.optimizer.load_state_dict(other["inner"])
        outer.load_state_dict(other["outer"])

    manager = torchft.Manager(
        pg=group,
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        use_async_quorum=False,
        replica_id=f"host{rank.host}",
        store_addr=address,
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=TIMEOUT,
        quorum_timeout=2 * TIMEOUT,
        lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"],
    )
    number = 0
    with DiLoCo(manager, [rank.model], rank.optimizer, outer, sync_every=rank.every, pin_memory=False):
        while True:
            for _ in range(rank.every):
                rank.step(rank.model, rank.optimizer)
            if manager.current_step() > number:
                number = manager.current_step()
                # What a rank learnt before it took the others' state is in no model.
                rank.merged(number, 0 if healed else rank.every * BATCH)
            healed.clear()


def elastic(rank: Rank) -> None:
    """Merge models by the clock with `LocalSteps` at 4 bits, with members that come and go."""
    from lightning_gqsgd import LocalSteps

    optimizer = LocalSteps(
        rank.model,
        rank.optimizer,
        every=timedelta(seconds=ROUND_S),
        delay=1,
        elastic=True,
        preset="gqsgd_diloco",
        timeout=TIMEOUT,
    )
    merges = 0
    while True:
        optimizer.add_samples(BATCH)
        rank.step(rank.model, optimizer)
        if optimizer.averages.averages > merges:
            merges = optimizer.averages.averages
            with optimizer.averages.at_anchor():
                rank.merged(merges, 0, entered=optimizer.samples, members=optimizer.averages.world_size)


WAYS: dict[str, Callable[[Rank], None]] = {
    "alone": alone,
    "ddp": ddp,
    "lock_step": lock_step,
    "torchft_diloco": torchft_diloco,
    "torchft_diloco_4bit": torchft_diloco_4bit,
    "elastic": elastic,
}


def serve(way: str, folder: Path) -> None:
    """Fork a rank, and another one whenever that one has been killed and this process is sent SIGUSR1."""
    from lightning_gqsgd.config.resolving import resolve
    from lightning_gqsgd.local_steps.choosing import make_local
    from lightning_gqsgd.wire.compiling import compile_kernels

    # Waited for without looking now and then, which would take a part of a slow host's time.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    for module in ("torchft.local_sgd", "lightning_gqsgd.local_steps.optimizer", "lightning_gqsgd.membership.manager"):
        importlib.import_module(module)
    _, config = make_local("gqsgd_diloco", {}, {})
    compile_kernels(resolve(config, 2), torch.float32, torch.device("cpu"), 2)
    torch.optim.AdamW([torch.zeros(1)])  # the first optimizer imports torch's compiler
    while True:
        child = os.fork()
        if not child:
            WAYS[way](Rank(folder))
        os.waitpid(child, 0)
        signal.sigwait({signal.SIGUSR1})


def main() -> None:
    """Run the command line."""
    way, folder = sys.argv[1], Path(sys.argv[2])
    address = os.environ["NETLAB_ADDRESS"]
    # torchft tells others to come to this name, and all hosts of a lab have the machine's.
    socket.gethostname = lambda: address
    torch.set_num_threads(1)
    down = folder / f"down{os.environ['NETLAB_HOST']}"
    if down.exists():  # this host's rank was killed, and its host is away for a time
        time.sleep(max(0.0, float(down.read_text()) - time.monotonic()))
    if "--again" in sys.argv:
        serve(way, folder)
    WAYS[way](Rank(folder))


if __name__ == "__main__":
    main()
