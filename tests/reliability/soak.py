"""One rank of the soak test: two models with hooks, one with local steps, random tensors, sleeps and garbage
collections, for many steps."""

from __future__ import annotations

import ctypes
import gc
import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.ddp.functional import all_reduce, close
from lightning_gqsgd.ddp.hook import GQSGDState, register_gqsgd
from lightning_gqsgd.local_steps.optimizer import LocalSteps
from lightning_gqsgd.wire.communicator import Communicator
from lightning_gqsgd.wire.engine import Engine
from lightning_gqsgd.wire.pipeline import Job
from lightning_gqsgd.wire.plan import Plan
from tests.bits import bits_of
from tests.distributed.models import batch, mlp

#: What hooks are registered with, in turns.
HOOKS: list[dict[str, Any]] = [
    {},
    {"reducer": "sum", "bits": 6},
    {"preset": "signsgd_ef"},
    {"codec": "exponential", "reducer": "tree", "bits": 5},
    {"coder": "elias", "reducer": "gather", "dither": "stochastic"},
    {"reducer": "native"},
    {"codec": "eden", "bits": 3},
    {"codec": "linear", "memory": "diana", "memory_down": "ef21", "reducer": "two_shot"},
    {"codec": "top_k", "memory": "ef21"},
    {"rotation": True, "bits": 4},
    {"auto": True},
    {"codec": "float"},
    {"reducer": "hierarchical", "node_size": 2},
    {"bits": {"*": 4, "0.*": 8}},
    {"bits": "auto"},
]
#: What tensors are reduced with.
REDUCTIONS: list[dict[str, Any]] = [{}, {"bits": 4}, {"reducer": "sum"}]
#: What local steps are made with, in turns.
LOCAL: list[dict[str, Any]] = [
    {"every": 5, "outer_after": 10},
    {"every": 4, "outer_after": 0, "fragments": 2, "delay": 1, "bits": 2},
    {"preset": "gqsgd_fedpaq", "every": 3},
    {"preset": "gqsgd_chb", "every": 2},
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
#: Features of the models' inner layers.
WIDTHS = [16, 64, 200]
#: What nothing may keep alive once its model is gone.
HELD: list[type] = [GQSGDState, Engine, Communicator, Plan, Job]
#: Steps of a model with local steps, before it is replaced.
LOCAL_LIFE_STEPS = 25
#: Steps of a model, before it is replaced by another one with other buckets and another hook.
LIFE_STEPS = 50


class SoakRank:
    """One rank; see `pool.Pool`."""

    def __init__(self, rank: int, ranks: int, folder: Path, timeout_s: float) -> None:
        self.rank, self.ranks = rank, ranks
        self._models: deque[tuple[DistributedDataParallel, GQSGDState]] = deque()
        self._local: tuple[nn.Module, LocalSteps] | None = None
        self._made, self._made_local = 0, 0
        self._compared: list[tuple[str, str]] = []

    def warm_up(self) -> dict[str, Any]:
        """Use every hook and every width with every dtype once, so that later steps compile nothing; what is held then.

        The package compiles kernels for each codec and dtype, and oneDNN for each shape and dtype of a layer.
        """
        for width in WIDTHS:
            for dtype in DTYPES:
                plain = DistributedDataParallel(mlp(width).to(dtype))
                self._train(plain, 0, random.Random(0))  # noqa: S311
                del plain
        for fields in HOOKS:
            for dtype in DTYPES:
                model = DistributedDataParallel(mlp(64).to(dtype))
                state = register_gqsgd(model, sample_every=1, **fields)
                for step in range(2):
                    self._train(model, step, random.Random(0))  # noqa: S311
                state.close()
                del model, state
        for fields in REDUCTIONS:
            for dtype in DTYPES:
                all_reduce(torch.ones(1500, dtype=dtype), **fields)
        for _ in LOCAL:
            self._replace_local()
            for step in range(6):
                self._train_locally(step)
        held = self.close()
        gc.freeze()  # collections take 0.3 s otherwise, most of it for torch's own objects
        return held

    def close(self) -> dict[str, Any]:
        """Drop and close everything; says what the process still holds, and hashes of what all ranks have alike.

        Each model was hashed before it was dropped, and each mean when it was there.
        """
        while self._models:
            self._drop()
        self._drop_local()
        close()
        compared, self._compared = self._compared, []
        return {"compared": compared, "made": self._made} | _held() | _alive()

    def soak(self, seed: int, first: int, steps: int) -> None:
        """Do some steps. What this frame refers to is alive until it returns, so `close` is a call of its own.

        Args:
            seed: of the random choices that all ranks share.
            first: number of the first step.
            steps: how many steps.
        """
        shared, own = random.Random(f"{seed} {first}"), random.Random(f"{seed} {first} {self.rank}")  # noqa: S311
        with _collecting(f"{seed} {first} {self.rank} thread"):
            for step in range(first, first + steps):
                self._step(step, shared, own)

    def _step(self, step: int, shared: random.Random, own: random.Random) -> None:
        """A step of each model, in random order, and sometimes some means."""
        if step % (LIFE_STEPS // 2) == 0:
            self._replace(shared)
        while len(self._models) < 2:
            self._replace(shared)
        order = list(self._models)
        shared.shuffle(order)
        for model, _ in order:
            self._train(model, step, own)
        if self._local is None or step % LOCAL_LIFE_STEPS == 0:
            self._replace_local()
        self._train_locally(step)
        if shared.random() < 0.3:
            self._reduce(shared)
        if own.random() < 0.05:
            gc.collect()

    def _drop(self) -> None:
        """Drop the oldest model, without closing its hook, after hashing it."""
        model, state = self._models.popleft()
        number = self._made - len(self._models) - 1
        self._compared.append((f"hook {number % len(HOOKS)}", _bits(model)))
        del model, state
        gc.collect()

    def _replace(self, shared: random.Random) -> None:
        """Drop the older of two models, and make another one; half of them are closed first."""
        if len(self._models) == 2:
            if shared.random() < 0.5:
                self._models[0][1].close()
            self._drop()
        dtype = shared.choice(DTYPES)
        inner = mlp(shared.choice(WIDTHS)).to(dtype)
        model = DistributedDataParallel(inner, bucket_cap_mb=shared.choice([0.001, 0.02, 25]))
        state = register_gqsgd(model, sample_every=shared.choice([0, 7]), **HOOKS[self._made % len(HOOKS)])
        self._models.append((model, state))
        self._made += 1

    def _replace_local(self) -> None:
        """Drop the model with local steps, and make another one."""
        self._drop_local()
        model = mlp(64)
        inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        self._local = model, LocalSteps(model, inner, **LOCAL[self._made_local % len(LOCAL)])
        self._made_local += 1

    def _drop_local(self) -> None:
        """Drop the model with local steps, after its last average and hashing it."""
        if self._local is not None:
            self._local[1].finish()  # ranks have the same bits after an average
            self._compared.append((f"local {(self._made_local - 1) % len(LOCAL)}", _bits(self._local[0])))
            self._local[1].close()
        self._local = None

    def _train_locally(self, step: int) -> None:
        assert self._local is not None
        model, optimizer = self._local
        x, y = batch(self.rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    def _train(self, model: DistributedDataParallel, step: int, own: random.Random) -> None:
        x, y = batch(self.rank, step)
        parameters = list(model.parameters())
        loss = nn.functional.cross_entropy(model(x.to(parameters[0].dtype)).float(), y)
        if own.random() < 0.1:
            time.sleep(own.random() * 0.02)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in parameters:
                parameter -= 0.01 * parameter.grad  # type: ignore[operator]

    def _reduce(self, shared: random.Random) -> None:
        fields = shared.choice(REDUCTIONS)
        tensors = [
            torch.randn(shared.choice([0, 1, 1500, 40_000])).to(shared.choice(DTYPES))
            for _ in range(shared.randrange(1, 5))
        ]
        for reduction in [all_reduce(tensor, async_op=True, **fields) for tensor in tensors]:
            mean = reduction.wait()
            assert mean.isfinite().all()
            self._compared.append((f"mean {REDUCTIONS.index(fields)}", bits_of([mean])))


def _bits(model: nn.Module) -> str:
    """Hash of all parameters' bits, of any dtype."""
    return bits_of(model.parameters())


def _alive() -> dict[str, float]:
    """How many objects there are of each class that belongs to a hook, a reduction or local steps."""
    return {kind.__name__: sum(type(thing) is kind for thing in gc.get_objects()) for kind in HELD}


@contextmanager
def _collecting(seed: str) -> Iterator[None]:
    """Another thread that collects garbage at random moments, until the block ends."""
    chance, ended = random.Random(seed), threading.Event()  # noqa: S311

    def collect() -> None:
        while not ended.wait(chance.random()):
            gc.collect()

    thread = threading.Thread(target=collect, name="collector")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


_MALLINFO2 = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]


class _Mallinfo2(ctypes.Structure):
    """What ``mallinfo2`` of glibc gives; bytes, but for numbers of blocks."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO2]


def _heap(libc: ctypes.CDLL) -> float:
    """What malloc has given and not got back, in MiB. Pages that it keeps for later are not part of that."""
    libc.mallinfo2.restype = _Mallinfo2
    info = libc.mallinfo2()
    return float(info.uordblks + info.hblkhd) / 2**20


def _held() -> dict[str, float]:
    """Memory and heap in MiB, threads and open files of this process.

    Memory is all pages that the process holds after malloc gave back those that it can.
    """
    gc.collect()
    libc = ctypes.CDLL("libc.so.6")
    libc.malloc_trim(0)
    process = psutil.Process()
    return {
        "memory": process.memory_info().rss / 2**20,
        "heap": _heap(libc),
        "threads": process.num_threads(),
        "files": process.num_fds(),
    }
