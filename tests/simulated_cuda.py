"""A GPU that is simulated on the CPU, to find races of streams, and what a real GPU would refuse.

Every operation runs at once on the CPU. The simulation keeps a vector clock for each stream, so it knows which
operations a GPU could run at the same time or in another order. It raises `RaceError` in five cases:

* Two streams use the same memory, one of them writes, and neither waits for the other.
* Memory is freed while a stream may still use it that PyTorch's caching allocator does not know of. PyTorch gives the
  memory to the next tensor on the stream that allocated it.
* An operation has tensors on the GPU and on the host.
* The host uses memory that a copy of the GPU may not have read or written yet.
* Two groups of NCCL may run at once. Ranks that run them in different orders wait for each other without an end.

Triton's kernels are not run. Their arguments count as read, or as written if they are in `WRITTEN`. NCCL's collectives
run on a stream of their group. Their results are this rank's own messages, or those of all ranks if `connected` is set.
Gloo's collectives end at once.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lightning_gqsgd import kernels
from lightning_gqsgd.kernels import layout
from lightning_gqsgd.kernels.cuda import launch
from lightning_gqsgd.wire import compiling

DEVICE = torch.device("cuda", 0)
HOST = torch.device("cpu")

#: Arguments that each kernel writes.
WRITTEN = {
    "combine_kernel": {"mine"},
    "decode_kernel": {"x", "counter"},
    "decode_sum_kernel": {"x", "counter"},
    "encode_kernel": {"wire"},
    "maxima_kernel": {"out"},
    "moments_kernel": {"out"},
    "narrow_kernel": {"out"},
    "reduce_kernel": {"out"},
    "rotate_kernel": {"x"},
}

#: Operations of PyTorch that read numbers of the GPU on the host, which waits for the current stream.
_HOST_READS = {
    *("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero"),
    *("aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave"),
}
#: Operations that only read the size of a tensor.
_SIZES = {
    f"aten::{name}"
    for name in ("empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like")
}
#: Operations whose tensors may be on different devices: copies, and those that take indices from the host.
_MIXED = {"aten::copy_", "aten::_to_copy", "aten::index", "aten::index_put_", "aten::_index_put_impl_"}

Clock = dict[str, int]


class RaceError(AssertionError):
    """What could go wrong on a real GPU."""


class Stream:
    """A stream: its clock has, for each stream, the number of its latest operation that comes before this stream's
    next. ``waited_for`` names the streams that it was told to wait for."""

    def __init__(self, cuda: SimulatedCuda, name: str, priority: int = 0) -> None:
        self.device = DEVICE
        self.name = name
        self.priority = priority
        self.clock: Clock = {name: 0}
        self.waited_for: list[str] = []
        self._cuda = cuda

    def __repr__(self) -> str:
        return self.name

    def tick(self) -> int:
        """Issue an operation, which comes after all that the host has waited for. Returns its number."""
        self.join(self._cuda.host)
        self.clock[self.name] += 1
        return self.clock[self.name]

    def join(self, clock: Clock) -> None:
        """Come after all operations of a clock."""
        join(self.clock, clock)

    def wait_event(self, event: Event) -> None:
        self.waited_for.append(event.where)
        self.join(event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._cuda)
        event.record(self)
        return event

    def synchronize(self) -> None:
        join(self._cuda.host, self.clock)


class Event:
    """An event. Unless the test says so, it has not passed before the host waits for it."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        self.clock: Clock = {}
        self.where = "nowhere"
        self._cuda = cuda

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._cuda.current_stream()
        self.clock = dict(stream.clock)
        self.where = stream.name

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._cuda.current_stream()).wait_event(self)

    def query(self) -> bool:
        if self._cuda.events_pass:
            self.synchronize()
        return comes_before(self.clock, self._cuda.host)

    def synchronize(self) -> None:
        join(self._cuda.host, self.clock)

    def elapsed_time(self, other: Event) -> float:
        return 1.0


def join(clock: Clock, other: Clock) -> None:
    """Let a clock come after another."""
    for name, number in other.items():
        clock[name] = max(number, clock.get(name, 0))


def comes_before(clock: Clock, other: Clock) -> bool:
    """Returns whether all operations of a clock come before the next of another."""
    return all(number <= other.get(name, 0) for name, number in clock.items())


@dataclass(frozen=True)
class Access:
    """A use of bytes ``low`` to ``high - 1`` of a storage by operation ``number`` of a stream."""

    stream: str
    number: int
    low: int
    high: int
    writes: bool
    what: str

    def conflicts(self, other: Access) -> bool:
        return (self.writes or other.writes) and self.low < other.high and other.low < self.high

    def is_before(self, clock: Clock) -> bool:
        return self.number <= clock.get(self.stream, 0)


@dataclass
class Memory:
    """A storage on the GPU, the stream that allocated it, those that were recorded for it, and who used it."""

    storage: StorageWeakRef
    nbytes: int
    stream: Stream
    recorded: set[str] = field(default_factory=set)
    accesses: list[Access] = field(default_factory=list)


class GpuTensor(Tensor):
    """A tensor in the host's memory that says it is on the GPU."""

    gpu: SimulatedCuda
    is_cuda = True
    is_cpu = False
    device = DEVICE

    def record_stream(self, stream: Any) -> None:
        self.gpu.memory_of(self).recorded.add(stream.name)

    def get_device(self) -> int:
        return 0

    def pin_memory(self, device: Any = None) -> Tensor:
        raise RuntimeError("cannot pin a tensor of the GPU")


class SimulatedCuda:
    """What replaces `torch.cuda`; see the module.

    Attributes:
        host: the clock of what the host has waited for.
        events_pass: whether an event has passed as soon as a thread looks.
        connected: whether groups of NCCL connect to the other ranks, by Gloo.
        launches: number of launches of kernels, by their names.
        host_waits: what has made the host wait.
        is_capturing: whether a CUDA graph is captured.
        made: the streams that were created.
        devices: the threads whose device was set.
        allocated: bytes of the GPU's memory that are in use, by the stream that allocated them.
        peak: the most bytes that have been in use. PyTorch keeps memory for the stream that allocated it.
    """

    def __init__(self) -> None:
        self.host: Clock = {}
        self.events_pass = False
        self.connected = False
        self.launches: dict[str, int] = {}
        self.host_waits: list[str] = []
        self.is_capturing = False
        self.made: list[Stream] = []
        self.devices: list[tuple[str, torch.device]] = []
        self.allocated: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.default = Stream(self, "default")
        self.latest_collective: tuple[object, Clock] = (None, {})  # its group, and its end
        self._local = threading.local()
        self._memory: dict[int, Memory] = {}
        # Copies of the GPU from and to memory of the host, which the host has not waited for when they began.
        self._copies: dict[int, tuple[StorageWeakRef, list[Access]]] = {}
        self._lock = threading.RLock()
        GpuTensor.gpu = self

    def current_stream(self, _: object = None) -> Stream:
        return getattr(self._local, "stream", self.default)

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        before = self.current_stream()
        self._local.stream = stream or before
        try:
            yield
        finally:
            self._local.stream = before

    def new_stream(self, device: object = None, priority: int = 0) -> Stream:
        self.made.append(Stream(self, f"stream {len(self.made) + 1}", priority))
        return self.made[-1]

    def set_device(self, device: torch.device) -> None:
        self.devices.append((threading.current_thread().name, device))

    def new_event(self, **_: object) -> Event:
        return Event(self)

    @contextmanager
    def called_by_torch(self) -> Iterator[None]:
        """Context manager for code that PyTorch calls while operations are not noted, which notes them again."""
        before = self._local.paused
        self._local.paused = 0
        try:
            with _Devices(self):
                yield
        finally:
            self._local.paused = before

    def on_gpu(self, tensor: Tensor) -> GpuTensor:
        """Returns a copy of a host's tensor in new memory of the GPU, written on the current stream."""
        with torch._C.DisableTorchFunctionSubclass(), paused(self):
            copy = tensor.detach().clone()
        self.allocate(copy)
        self.access(copy, writes=True, what="copy from the host")
        return copy.as_subclass(GpuTensor)

    def adopted(self, tensor: Tensor) -> GpuTensor:
        """Returns a tensor of the host as one of the GPU in the same memory, which the current stream has written."""
        self.allocate(tensor)
        self.current_stream().tick()
        self.access(tensor, writes=True, what="gradients")
        return tensor.as_subclass(GpuTensor)

    # --- memory -----------------------------------------------------------------------------------------------------

    def is_on_gpu(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._memory

    def memory_of(self, tensor: Tensor) -> Memory:
        return self._memory[tensor.untyped_storage()._cdata]

    def allocate(self, tensor: Tensor) -> None:
        """Note new memory of the current stream."""
        self.find_freed()
        storage = tensor.untyped_storage()
        if storage._cdata not in self._memory:
            stream = self.current_stream()
            self._memory[storage._cdata] = Memory(StorageWeakRef(storage), storage.nbytes(), stream)
            self.allocated[stream.name] += storage.nbytes()
            self.peak |= self.allocated

    def find_freed(self) -> None:
        """Check memory that has been freed since the last call."""
        for key, memory in list(self._memory.items()):
            if not memory.storage.expired():
                continue
            del self._memory[key]
            self.allocated[memory.stream.name] -= memory.nbytes
            owner = memory.stream
            known = {**owner.clock}
            join(known, self.host)
            for access in memory.accesses:
                if access.stream not in (owner.name, *memory.recorded) and not access.is_before(known):
                    raise RaceError(
                        f"memory of {owner} is freed, and {access.stream} may still use it ({access.what}); "
                        "call record_stream, or keep the tensor"
                    )

    def access(self, tensor: Tensor, *, writes: bool, what: str) -> None:
        """Note that the current operation of the current stream reads or writes a tensor."""
        if not tensor.numel():
            return
        stream = self.current_stream()
        first = tensor.storage_offset()
        steps = zip(tensor.size(), tensor.stride(), strict=True)
        end = first + sum((size - 1) * stride for size, stride in steps) + 1
        width = tensor.element_size()
        own = Access(stream.name, stream.clock[stream.name], int(first * width), int(end * width), writes, what)
        memory = self.memory_of(tensor)
        for other in memory.accesses:
            if other.conflicts(own) and not other.is_before(stream.clock):
                raise RaceError(
                    f"{stream} {'writes' if writes else 'reads'} ({what}) what {other.stream} "
                    f"{'writes' if other.writes else 'reads'} ({other.what}), and does not wait for it"
                )
        # An access that comes before this one and that this one covers can be forgotten.
        memory.accesses = [
            other
            for other in memory.accesses
            if other.stream != own.stream or other.writes > writes or other.low < own.low or other.high > own.high
        ]
        memory.accesses.append(own)

    def copies_beside(self, tensor: Tensor, *, writes: bool) -> None:
        """Note that the current operation copies from or to a tensor of the host, which does not wait."""
        storage = tensor.untyped_storage()
        kept = self._copies.setdefault(storage._cdata, (StorageWeakRef(storage), []))
        stream = self.current_stream()
        kept[1].append(Access(stream.name, stream.clock[stream.name], 0, storage.nbytes(), writes, "copy"))

    def uses_on_host(self, tensor: Tensor, *, writes: bool) -> None:
        """Check that the host may read or write a tensor of its memory now."""
        reference, copies = self._copies.get(tensor.untyped_storage()._cdata, (None, []))
        if reference is None or reference.expired():
            return
        for copy in copies:
            if (copy.writes or writes) and not copy.is_before(self.host):
                raise RaceError(
                    f"the host {'writes' if writes else 'reads'} what {copy.stream} "
                    f"{'writes' if copy.writes else 'reads'}, and does not wait for it"
                )

    # --- operations -------------------------------------------------------------------------------------------------

    def ran(self, operation: Any, args: Sequence[Any], kwargs: dict[str, Any], results: Any) -> None:
        """Note an operation of PyTorch."""
        schema = operation._schema
        name = schema.name
        given = list(zip(schema.arguments, args, strict=False))
        given += [(argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs]
        used = [(argument, tensor) for argument, value in given for tensor in tensors_in(value)]
        on_gpu = [(argument, tensor) for argument, tensor in used if self.is_on_gpu(tensor)]
        if operation.is_view or name in ("aten::detach", "aten::alias"):
            return
        if not on_gpu:
            for argument, tensor in used:
                self.uses_on_host(tensor, writes=_is_written(argument))
            return
        on_host = [tensor for _, tensor in used if not self.is_on_gpu(tensor) and tensor.dim()]
        if on_host and name not in _MIXED:
            raise RaceError(f"{name} has tensors on the GPU and on the host")
        self.current_stream().tick()
        for argument, tensor in on_gpu:
            writes = _is_written(argument)
            if writes or name not in _SIZES:
                self.access(tensor, writes=writes, what=name)
        if name == "aten::copy_" and on_host:
            self.copies_beside(on_host[0], writes=not self.is_on_gpu(args[0]))
        has_mask = name.startswith("aten::index") and any(one.dtype == torch.bool for one in tensors_in(args[1]))
        has_copied = name == "aten::copy_" and bool(on_host) and not (len(args) > 2 and args[2])
        if name in _HOST_READS or has_mask or has_copied:
            self.wait_on_host(name)
        inputs = {tensor.untyped_storage()._cdata for _, tensor in used}
        for result in tensors_in(results):
            if result.untyped_storage()._cdata not in inputs:
                self.allocate(result)
                self.access(result, writes=True, what=name)

    def wait_on_host(self, what: str) -> None:
        """Let the host wait for the current stream."""
        self.host_waits.append(what)
        self.current_stream().synchronize()

    def start(self, kernel: Any, c: Any, programs: int, *arguments: Any, **constants: Any) -> Any:
        """Launch a kernel, and return what launches it again; see `launch.start`."""
        self._launch(kernel, arguments)
        names = len(arguments)

        class Compiled:
            def __getitem__(_, grid: tuple[int, ...]) -> Callable[..., None]:
                return lambda *given, stream: self._launch(kernel, given[:names])

        return Compiled()

    def _launch(self, kernel: Any, arguments: Sequence[Any]) -> None:
        name = kernel.__name__
        self.launches[name] = self.launches.get(name, 0) + 1
        self.current_stream().tick()
        for argument, value in zip(kernel.arg_names, arguments, strict=False):
            if isinstance(value, Tensor):
                if not self.is_on_gpu(value):
                    raise RaceError(f"{name} gets {argument!r} on the host")
                self.access(value, writes=argument in WRITTEN[name], what=f"{name}: {argument}")


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors of an argument, or of a result."""
    if isinstance(value, Tensor):
        return [value]
    return [one for each in value for one in tensors_in(each)] if isinstance(value, (list, tuple)) else []


class _Dispatch(TorchDispatchMode):
    """Tells the simulation of all operations."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if not _is_paused(self._cuda):
            with self._cuda._lock:
                self._cuda.ran(func, args, kwargs or {}, results)
        return results


class _Devices(TorchFunctionMode):
    """Lets PyTorch's functions know the simulated device."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        own = args[0] if args and isinstance(args[0], Tensor) else None
        if name == "pin_memory":
            return own
        kwargs.pop("pin_memory", None)
        if name == "numpy" and isinstance(own, GpuTensor):
            raise TypeError("a tensor of the GPU has no array")
        if name in ("tolist", "item", "numpy") and own is not None and not isinstance(own, GpuTensor):
            self._cuda.uses_on_host(own, writes=False)
        if name in ("tolist", "item") and isinstance(own, GpuTensor):
            self._cuda.wait_on_host(name)
            with paused(self._cuda):
                return getattr(own.as_subclass(Tensor), name)()
        wanted = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.device)]
        if name == "cpu":
            wanted = [HOST]
        if name in ("to", "cpu") and wanted and own is not None:
            return self._moved(own, wanted[0], func, args, kwargs)
        if not wanted or wanted[0].type != "cuda":
            return func(*args, **kwargs)
        args = [HOST if isinstance(value, torch.device) else value for value in args]
        kwargs = {key: HOST if isinstance(value, torch.device) else value for key, value in kwargs.items()}
        made = func(*args, **kwargs)
        if not isinstance(made, Tensor):
            return made
        if not self._cuda.is_on_gpu(made):
            self._cuda.allocate(made)
            self._cuda.current_stream().tick()
            self._cuda.access(made, writes=name != "empty", what=name)
        return made.as_subclass(GpuTensor)

    def _moved(self, own: Tensor, device: torch.device, func: Any, args: Any, kwargs: Any) -> Tensor:
        others = [value for value in args[1:] if not isinstance(value, (torch.device, bool))]
        dtype = kwargs.get("dtype", next((value for value in others if isinstance(value, torch.dtype)), own.dtype))
        if isinstance(own, GpuTensor) == (device.type == "cuda"):
            return own.to(dtype)
        waits = not kwargs.get("non_blocking", False)
        if device.type == "cuda":
            self._cuda.current_stream().tick()
            moved: Tensor = self._cuda.on_gpu(own.to(dtype))
            self._cuda.copies_beside(own, writes=False)
        else:
            self._cuda.current_stream().tick()
            self._cuda.access(own, writes=False, what="copy to the host")
            with paused(self._cuda):
                moved = own.as_subclass(Tensor).detach().clone().to(dtype)
        if waits:
            self._cuda.wait_on_host(f"copy to {device}")
        return moved


@contextmanager
def paused(cuda: SimulatedCuda) -> Iterator[None]:
    """Context manager in which operations are not noted."""
    cuda._local.paused = getattr(cuda._local, "paused", 0) + 1
    try:
        yield
    finally:
        cuda._local.paused -= 1


def _is_paused(cuda: SimulatedCuda) -> bool:
    return bool(getattr(cuda._local, "paused", 0))


class Work:
    """A collective under way. It keeps its tensors until somebody waits for it, as PyTorch does."""

    def __init__(self, cuda: SimulatedCuda, ended: Event, tensors: list[Tensor]) -> None:
        self._cuda, self._ended, self._tensors = cuda, ended, tensors

    def wait(self, timeout: object = None) -> bool:
        self._ended.wait()
        self._tensors = []
        return True

    def is_completed(self) -> bool:
        return True


_GLOO: Any = dist.ProcessGroupGloo


class NcclGroup:
    """A group of NCCL: collectives run on its own stream, after the current stream, in their order."""

    cuda: SimulatedCuda

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._stream = self.cuda.new_stream()
        self._ranks: Any = _GLOO(store, rank, size, timeout) if self.cuda.connected else None

    def allreduce(self, tensors: list[Tensor], operation: object) -> Work:
        return self._run("allreduce", tensors[0], tensors[0], lambda x, _: self._ranks.allreduce([x], operation))

    def alltoall_base(self, output: Tensor, source: Tensor, *splits: list[int]) -> Work:
        return self._run("alltoall", output, source, lambda x, y: self._ranks.alltoall_base(x, y, *splits))

    def _allgather_base(self, output: Tensor, source: Tensor) -> Work:
        return self._run("allgather", output, source, lambda x, y: self._ranks._allgather_base(x, y))

    def abort(self) -> None:
        """End nothing."""

    def _run(self, what: str, output: Tensor, source: Tensor, start: Callable[[Tensor, Tensor], Any]) -> Work:
        for tensor in (output, source):
            if tensor.numel() and not self.cuda.is_on_gpu(tensor):
                raise RaceError(f"NCCL gets a tensor of the host ({what})")
        self._stream.wait_stream(self.cuda.current_stream())
        latest, clock = self.cuda.latest_collective
        if latest is not self and not comes_before(clock, self._stream.clock):
            raise RaceError(f"two groups of NCCL may run at once ({what}), and deadlock")
        with self.cuda.stream(self._stream):
            self._stream.tick()
        self.cuda.latest_collective = self, dict(self._stream.clock)
        with self.cuda.stream(self._stream):
            self.cuda.access(source, writes=False, what=what)
            self.cuda.access(output, writes=True, what=what)
        with paused(self.cuda):
            if self._ranks is not None:
                # The threads of Gloo would inherit the modes.
                with _disable_current_modes():
                    start(output.as_subclass(Tensor), source.as_subclass(Tensor)).wait()
            elif output is not source and source.numel():
                _copied_over(output, source)
        return Work(self.cuda, self._stream.record_event(), [output, source])


class GlooWork:
    """A collective over Gloo that has ended."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def get_future(self) -> GlooWork:
        return self

    def done(self) -> bool:
        return True

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        callback(self)


class GlooGroup:
    """A group of Gloo, for tensors of the host."""

    cuda: SimulatedCuda
    _Options = SimpleNamespace

    def __init__(self, store: object, rank: int, size: int, options: object) -> None:
        self._size = size

    @staticmethod
    def create_default_device() -> None:
        """Create no device."""

    def _set_default_timeout(self, timeout: object) -> None:
        """No collective takes time."""

    def allreduce(self, tensors: list[Tensor], operation: object) -> GlooWork:
        return self._run(tensors[0], tensors[0])

    def alltoall_base(self, output: Tensor, source: Tensor, *splits: list[int]) -> GlooWork:
        return self._run(output, source)

    def _allgather_base(self, output: Tensor, source: Tensor) -> GlooWork:
        return self._run(output, source)

    def _run(self, output: Tensor, source: Tensor) -> GlooWork:
        for tensor in (output, source):
            if self.cuda.is_on_gpu(tensor):
                raise RaceError("Gloo gets a tensor of the GPU")
        self.cuda.uses_on_host(source, writes=False)
        self.cuda.uses_on_host(output, writes=True)
        with paused(self.cuda):
            if output is not source and source.numel():
                _copied_over(output, source)
        return GlooWork()


def _copied_over(output: Tensor, source: Tensor) -> None:
    """Fill the output of a collective with this rank's message."""
    copies = -(-output.numel() // source.numel())
    output.view(-1).copy_(source.reshape(-1).repeat(copies)[: output.numel()])


def _future_of(cuda: SimulatedCuda) -> type:
    class Future:
        """A future of tensors on the GPU: the stream that waits for it waits for the stream that completed it."""

        def __init__(self, *, devices: Sequence[torch.device] | None = None) -> None:
            self._devices = list(devices or [])
            self._event = Event(cuda)
            self._result: Any = None
            self._error: BaseException | None = None
            self._is_done = False
            self._ended = threading.Event()
            self._callbacks: list[Callable[[Any], Any]] = []
            self._lock = threading.Lock()

        def __class_getitem__(cls, _: object) -> type:
            return cls

        def done(self) -> bool:
            return self._is_done

        def value(self) -> Any:
            return self._result

        def set_result(self, result: Any) -> None:
            if not self._devices and any(isinstance(one, GpuTensor) for one in tensors_in(result)):
                raise RaceError("a future without devices gets a tensor of the GPU")
            self._result = result
            self._event.record()
            self._end()

        def _end(self) -> None:
            with self._lock:
                self._is_done = True
            self._ended.set()
            for callback in self._callbacks:
                callback(self)

        def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
            with self._lock:
                if not self._is_done:
                    self._callbacks.append(callback)
                    return
            callback(self)

        def then(self, callback: Callable[[Any], Any]) -> Future:
            following = Future(devices=self._devices)

            def pass_on(_: object) -> None:
                try:
                    following._result = callback(self)
                except Exception as error:
                    following._error = error
                following._event = self._event
                following._end()

            self.add_done_callback(pass_on)
            return following

        def wait(self) -> Any:
            assert self._ended.wait(60)
            if self._error is not None:
                raise self._error
            if self._devices:
                self._event.wait()
                for tensor in tensors_in(self._result):
                    cuda.memory_of(tensor).recorded.add(cuda.current_stream().name)
            return self._result

    return Future


@contextmanager
def simulation(patch: pytest.MonkeyPatch) -> Iterator[SimulatedCuda]:
    """Context manager in which this process has a simulated GPU."""
    cuda = SimulatedCuda()
    for name, value in {
        "current_stream": cuda.current_stream,
        "stream": cuda.stream,
        "Stream": cuda.new_stream,
        "Event": cuda.new_event,
        "is_current_stream_capturing": lambda: cuda.is_capturing,
        "set_device": cuda.set_device,
        "device": lambda device: nullcontext(),
        "get_device_name": lambda device: "a simulated GPU",
        "get_device_capability": lambda device: (8, 0),
    }.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(torch.futures, "Future", _future_of(cuda))
    patch.setattr(NcclGroup, "cuda", cuda, raising=False)
    patch.setattr(GlooGroup, "cuda", cuda, raising=False)
    patch.setattr(dist, "ProcessGroupNCCL", NcclGroup, raising=False)
    patch.setattr(dist, "ProcessGroupGloo", GlooGroup)
    patch.setattr(launch, "start", cuda.start)
    patch.setattr(launch, "raw_stream", lambda device: id(cuda.current_stream()))
    patch.setattr(launch, "_kept", {})
    patch.setattr(launch, "_counters", {})
    patch.setattr(layout, "_copies", {})
    patch.setattr(compiling, "check", lambda *_: None)  # kernels compute nothing
    launch._sent_keys.cache_clear()
    run = threading.Thread.run

    def run_simulated(thread: threading.Thread) -> None:
        with _Devices(cuda), _Dispatch(cuda):  # each thread has its own
            run(thread)

    patch.setattr(threading.Thread, "run", run_simulated)
    with _Devices(cuda), _Dispatch(cuda):
        yield cuda
    launch._sent_keys.cache_clear()


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCuda]:
    """A simulated GPU, which this process has."""
    pytest.importorskip("triton", minversion=".".join(map(str, kernels.MIN_TRITON)))
    with simulation(monkeypatch) as cuda:
        yield cuda
