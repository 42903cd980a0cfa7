"""Streams and events without a GPU, which record what is asked of them and never run anything later than at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = torch.device("cuda", 0)


class FakeStream:
    """Keeps what it was told to wait for: the streams on which events were recorded, or streams. ``host_has_waited``
    says whether the host has waited for it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.device = DEVICE
        self.priority = 0
        self.waited_for: list[str] = []
        self.host_has_waited = False

    def synchronize(self) -> None:
        self.host_has_waited = True

    def wait_stream(self, other: FakeStream) -> None:
        self.waited_for.append(other.name)

    def wait_event(self, event: FakeEvent) -> None:
        self.waited_for.append(event.where)


class FakeEvent:
    """Passed as soon as the test says so; the host must not wait for it unless the test allows it."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.where = cuda, "nowhere"

    def record(self, stream: FakeStream) -> None:
        self.where = stream.name
        self.at = next(self.cuda.clock)

    def query(self) -> bool:
        return self.cuda.has_passed

    def synchronize(self) -> None:
        assert self.cuda.may_wait, "the host waits for the GPU"

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1e3 * (other.at - self.at)


class FakeCuda:
    """What replaces `torch.cuda`."""

    def __init__(self) -> None:
        self.default = FakeStream("default")
        self.made: list[FakeStream] = []
        self.clock = count()
        self.has_passed = self.may_wait = self.is_capturing = False
        self.devices: list[tuple[str, torch.device]] = []  # threads whose device was set, and the device
        self.results: list[str] = []  # streams on which futures were given tensors: their events are recorded there
        self._local = threading.local()

    def current_stream(self, _: object = None) -> FakeStream:
        return getattr(self._local, "stream", self.default)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._local.stream = before

    def set_device(self, device: torch.device) -> None:
        self.devices.append((threading.current_thread().name, device))

    def new_stream(self, _: object = None, priority: int = 0) -> FakeStream:
        self.made.append(FakeStream(f"own {len(self.made)}"))
        self.made[-1].priority = priority
        return self.made[-1]

    def new_event(self, **_: object) -> FakeEvent:
        return FakeEvent(self)


def _future_of(fake: FakeCuda) -> type:
    """Torch's future asks a real GPU for events."""

    class FakeFuture(torch.futures.Future):  # type: ignore[type-arg]
        def __new__(cls, devices: object = None) -> FakeFuture:
            return super().__new__(cls)

        def __init__(self, devices: Sequence[torch.device] | None = None) -> None:
            super().__init__()
            self.devices = devices or ()

        def __class_getitem__(cls, _: object) -> type:
            return cls

        def set_result(self, result: object) -> None:
            for each in result if isinstance(result, list) else [result]:
                if isinstance(each, FakeTensor):
                    assert each.device in self.devices, "no stream would wait for the tensor"
                    fake.results.append(fake.current_stream().name)
            super().set_result(result)

    return FakeFuture


class FakeTensor(Tensor):
    """A tensor in the host's memory that says it is on a GPU."""

    is_cuda = True
    device = DEVICE
    streams: list[str]

    def record_stream(self, stream: Any) -> None:
        self.streams = [*getattr(self, "streams", []), stream.name]


def on_gpu(tensor: Tensor) -> FakeTensor:
    return tensor.as_subclass(FakeTensor)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "current_stream", fake.current_stream)
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "set_device", fake.set_device)
    monkeypatch.setattr(torch.cuda, "Stream", fake.new_stream)
    monkeypatch.setattr(torch.cuda, "Event", fake.new_event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.is_capturing)
    monkeypatch.setattr(torch.futures, "Future", _future_of(fake))
    return fake
