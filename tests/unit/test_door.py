"""Addresses of lighthouses as users write them, and what answers there."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest

from lightning_gqsgd import ConfigError
from lightning_gqsgd.membership import door
from lightning_gqsgd.wire.build import this_build

OWN = door.name_for({"bits": 4})

PAGE = """
Next quorum status: New quorum not ready, only have 1 participants, need min_replicas 3 [1/1 participants healthy]
<h3>Previous Quorum</h3>
<b>{member}</b> <br/>
Step: 7 <br/>
Manager: http://10.0.0.1:2 <br/>
<h2>Heartbeats</h2>
<li>
  {member}: seen 1.5s ago
</li>
"""

MEMBER = "<b>{}</b> <br/>\nStep: {} <br/>\nManager: http://10.0.0.{}:2 <br/>\n"


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """The address of a server that gives every caller one answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:  # closed
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def page(text: str) -> bytes:
    """An answer of HTTP."""
    return b"HTTP/1.0 200 OK\r\n\r\n" + text.encode()


def page_of(*members: tuple[str, int, str]) -> bytes:
    """The page of members: their names, their numbers of merges, and how long ago they were seen."""
    merged = "".join(MEMBER.format(name, merges, place) for place, (name, merges, _) in enumerate(members))
    return page(f"{merged}<h2>Heartbeats</h2>\n" + "".join(f"  {name}: seen {ago} ago\n" for name, _, ago in members))


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ("10.0.0.1:29510", "http://10.0.0.1:29510"),
        ("http://host:29510/", "http://host:29510"),
        (" host.example.org:1\n", "http://host.example.org:1"),
        ("[fd00::1]:29510", "http://[fd00::1]:29510"),
        ("http://[::1]:29510", "http://[::1]:29510"),
    ],
)
def test_an_address_may_be_a_name_or_a_number_of_either_kind(written: str, address: str) -> None:
    assert door.lighthouse_address({door.LIGHTHOUSE: written}) == address


@pytest.mark.parametrize(
    "written",
    [
        "10.0.0.1",
        "10.0.0.1:",
        "10.0.0.1:0",
        "10.0.0.1:-1",
        "10.0.0.1:65536",
        "10.0.0.1:x",
        "::1",
        "::1:29510",
        "[::1]",
        "[::1:29510",
        "[fe80::1%eth0]:29510",
        "two words:29510",
        "10.0.0.1:29510,10.0.0.2:29510",
        "tcp://10.0.0.1:29510",
        "https://10.0.0.1:29510",
        "//10.0.0.1:29510",
        "http://10.0.0.1:29510/status",
        "user:word@10.0.0.1:29510",
        ":29510",
    ],
)
def test_what_is_no_address_is_refused_in_one_line_that_shows_one_of_each_kind(written: str) -> None:
    with pytest.raises(
        ConfigError, match=r"is not an address; write host:port, e\.g\. 10\.0\.0\.1:29510 or \[fd00::1\]"
    ):
        door.lighthouse_address({door.LIGHTHOUSE: written})


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "a" * 64])
def test_a_host_that_cannot_be_found_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=f"the lighthouse http://{host}:29510 cannot be reached"):
        door.check_resolves(f"http://{host}:29510")


@pytest.mark.parametrize("answer", [page("hello"), b"SSH-2.0-OpenSSH_9.6\r\n", b""], ids=["web", "ssh", "nothing"])
def test_what_answers_in_place_of_a_lighthouse_is_said_to_be_none(answer: bytes) -> None:
    words = "is not a lighthouse; start one with `gqsgd lighthouse` at a port that is free|no lighthouse answers at"
    with answering(answer) as address, pytest.raises(ConfigError, match=words):
        door.check_others(address, OWN, 0.0)


def test_a_lighthouse_that_waits_for_more_members_says_how_many() -> None:
    with answering(page(PAGE)) as address:
        assert "1 member came to the lighthouse" in str(door.shortage_at(address, 5.0))
        assert "it was started with --min-replicas 3" in str(door.shortage_at(address, 5.0))
    with answering(page(PAGE.replace("only have", "have"))) as address:
        assert door.shortage_at(address, 5.0) is None


def test_members_are_asked_for_their_state_and_for_their_merges() -> None:
    with answering(page(PAGE.replace("{member}", f"{OWN}:1"))) as address:
        assert door.check_others(address, OWN, 5.0) == ["http://10.0.0.1:2"]
        assert door.merges_at(address, 5.0) == 7
        assert door.own_host(address, 5.0) == "127.0.0.1"


class Connection:
    """A connection to a lighthouse, from an address of this machine."""

    def __init__(self, own: str, lighthouse: str) -> None:
        self.getsockname = lambda: (own, 1)
        self.getpeername = lambda: (lighthouse, 2)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("own", "lighthouse", "other", "words"),
    [
        ("127.0.0.1", "127.0.0.1", "192.0.2.1", "finds the lighthouse http://name:1 at 127.0.0.1, where the member at"),
        ("::1", "::1", "[2001:db8::1]", "finds the lighthouse http://name:1 at ::1, where the member at 2001:db8::1"),
        ("192.0.2.2", "192.0.2.1", "127.0.0.1", "has a member at 127.0.0.1, where this machine cannot reach it"),
        ("192.0.2.1", "192.0.2.1", "127.0.0.1", None),  # of one machine, as are the next two
        ("127.0.0.1", "127.0.0.1", "127.0.0.2", None),
        ("::1", "::1", "127.0.0.1", None),
        ("192.0.2.2", "192.0.2.1", "192.0.2.3", None),
        ("192.0.2.2", "192.0.2.1", "some-name", None),
    ],
)
def test_members_of_which_one_finds_the_lighthouse_at_localhost_and_the_other_elsewhere_refuse_each_other(
    own: str, lighthouse: str, other: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door.socket, "create_connection", lambda *_: Connection(own, lighthouse))
    with nullcontext() if words is None else pytest.raises(ConfigError, match=re.escape(words)):
        assert door.own_host("http://name:1", 5.0, [f"http://{other}:2"]) == own


def test_members_with_the_most_merges_are_asked_first_and_those_that_are_gone_never() -> None:
    members = [(f"{OWN}:1", 3, "1.5s"), (f"{OWN}:2", 9, "20ms"), (f"{OWN}:3", 11, "8.5s"), ("gqsgd-other:4", 12, "9s")]
    with answering(page_of(*members)) as address:
        assert door.check_others(address, OWN, 5.0) == ["http://10.0.0.1:2", "http://10.0.0.0:2"]
        assert door.merges_at(address, 5.0) == 9
        assert door.members_at(address, 5.0) == [f"{OWN}:1", f"{OWN}:2"]
        assert len(door.members_at(address, 5.0, alive_s=60.0)) == 4


def test_a_member_of_another_training_that_is_there_is_an_error() -> None:
    members = [(f"{OWN}:1", 3, "1.5s"), ("gqsgd-other:4", 12, "4.9s")]
    with answering(page_of(*members)) as address, pytest.raises(ConfigError, match="members that do not fit"):
        door.check_others(address, OWN, 5.0)


@pytest.mark.parametrize("build", ["0.1.0", "0.1.0-wire3-0123456789ab"])
def test_members_of_another_build_are_said_to_be_that(build: str) -> None:
    words = rf"another build of lightning-gqsgd \({build}\) than this one \({this_build()}\); install the same on all"
    other = page_of((f"gqsgd-{build}-0123456789abcdef:1", 3, "1.5s"))
    with answering(other) as address, pytest.raises(ConfigError, match=words):
        door.check_others(address, OWN, 5.0)
