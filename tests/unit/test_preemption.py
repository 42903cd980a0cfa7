"""SIGTERM as the notice that a machine is about to be taken away."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from lightning_gqsgd.local_steps.merges.preemption import PreemptionNotice


def _never() -> bool:
    return False


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_notice_is_noted_and_the_process_lives() -> None:
    notice = PreemptionNotice(_never)
    assert not notice.was_given
    signal.raise_signal(signal.SIGTERM)
    assert notice.was_given
    notice.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_handler_that_is_there_is_called_as_well_and_comes_back() -> None:
    called = []

    def handler(*_: object) -> None:
        called.append(1)

    signal.signal(signal.SIGTERM, handler)
    notice = PreemptionNotice(_never)
    signal.raise_signal(signal.SIGTERM)
    assert (notice.was_given, called) == (True, [1])
    notice.close()
    notice.close()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_who_has_taken_the_signal_since_keeps_it() -> None:
    notice = PreemptionNotice(_never)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    notice.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


@pytest.mark.parametrize("is_over", [False, True])
def test_a_forked_process_and_one_whose_merges_are_over_die_of_it(is_over: bool) -> None:
    notice = PreemptionNotice(lambda: is_over)
    child = os.fork()
    if child == 0:
        if is_over:
            notice._process = os.getpid()
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    notice.close()
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM


def test_in_another_thread_nobody_listens() -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(PreemptionNotice(_never)))
    thread.start()
    thread.join()
    found[0].close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
