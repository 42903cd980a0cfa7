"""One of two peers of hivemind that average a tensor, for `benchmarks.rival_means`; imports nothing of this package.

    VENV/bin/python benchmarks/rival_hivemind.py RANK FOLDER ADDRESS ROUNDS

hivemind needs a virtual environment of its own, because its versions of other packages are older. FOLDER is one that
both peers see; it has the gradients as ``gradient0.npy`` and ``gradient1.npy``, and gets a file of results.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import hivemind
import numpy as np
import torch
from hivemind import compression
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage

#: Codecs by name; its 8-bit codes need a NumPy before 2.
CODECS = {"hivemind fp16": compression.Float16Compression, "hivemind 8 bit": compression.Uniform8BitQuantization}
PATIENCE_S = 60.0


def wait_for(condition, what: str) -> None:  # type: ignore[no-untyped-def]
    """Wait until a condition holds."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.002)


def meet(folder: Path, rank: int, name: str) -> None:
    """Wait for the other peer."""
    (folder / f"{name}.{rank}").touch()
    wait_for((folder / f"{name}.{1 - rank}").exists, f"the other peer did not come to {name}")


def processor_seconds() -> float:
    """Processor time of this process and of all that it started, such as the daemon that sends."""
    parents, times = {}, {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # the process has ended
        pid = int(entry.parent.name)
        parents[pid] = int(fields[1])
        times[pid] = int(fields[11]) + int(fields[12])
    mine = {os.getpid()}
    for _ in range(8):  # generations
        mine |= {pid for pid, parent in parents.items() if parent in mine}
    return sum(times[pid] for pid in mine if pid in times) / os.sysconf("SC_CLK_TCK")


def averaged(name: str, dht: hivemind.DHT, own: torch.Tensor, rank: int, folder: Path, rounds: int) -> dict:
    """Returns seconds, processor seconds and the digest of the mean of some rounds."""
    averager = DecentralizedAverager(
        [own.clone()],
        dht,
        prefix=name.replace(" ", "_"),
        target_group_size=2,
        min_group_size=2,
        min_matchmaking_time=1.0,
        compression=CODECS[name](),
        start=True,
    )
    found: dict = {"seconds": [], "processor": []}
    for number in range(rounds + 1):
        with averager.get_tensors() as tensors:
            tensors[0].copy_(own)
        control = averager.step(wait=False, require_trigger=True, timeout=PATIENCE_S)
        wait_for(lambda: control.stage == AveragingStage.AWAITING_TRIGGER, "no group was found")  # noqa: B023
        meet(folder, rank, f"{name} {number}")
        worked, begun = processor_seconds(), time.perf_counter()
        control.allow_allreduce()
        control.result(timeout=PATIENCE_S)
        if number:  # the first one warms up
            found["seconds"].append(time.perf_counter() - begun)
            found["processor"].append(processor_seconds() - worked)
    with averager.get_tensors() as tensors:
        mean = tensors[0].numpy().copy()
    np.save(folder / f"{name} {rank}.npy", mean)
    found["digest"] = hashlib.sha256(mean.tobytes()).hexdigest()
    averager.shutdown()
    return found


def main() -> None:
    """Average with all codecs."""
    rank, folder, address, rounds = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    torch.set_num_threads(1)
    own = torch.from_numpy(np.load(folder / f"gradient{rank}.npy"))
    maddrs = folder / "peers.json"
    if rank:
        wait_for(maddrs.exists, "the first peer did not start")
    peers = json.loads(maddrs.read_text()) if rank else []
    dht = hivemind.DHT(initial_peers=peers, host_maddrs=[f"/ip4/{address}/tcp/0"], start=True)
    if not rank:
        (folder / "peers.new").write_text(json.dumps([str(one) for one in dht.get_visible_maddrs()]))
        (folder / "peers.new").rename(maddrs)
    result = {}
    for name in CODECS:
        try:
            result[name] = averaged(name, dht, own, rank, folder, rounds)
        except Exception as error:  # one codec may fail where another works
            result[name] = {"error": f"{type(error).__name__}: {error}"[:200]}
    (folder / f"result{rank}.json").write_text(json.dumps(result))
    meet(folder, rank, "end")
    dht.shutdown()


if __name__ == "__main__":
    main()
