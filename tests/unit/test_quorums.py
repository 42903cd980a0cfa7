"""Numbers of quorums, which stay distinct when a lighthouse counts from 1 again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lightning_gqsgd.membership.quorums import DistinctQuorums


class Client:
    """A client that answers with what the test has put there."""

    def __init__(self) -> None:
        self.answer = (0, "", 0)

    def _quorum(self, step: int, *, timeout: float) -> Any:
        number, members, merges = self.answer
        return SimpleNamespace(
            quorum_id=number,
            replica_ids=list(members.lower()),
            max_step=merges,
            # Members in capitals are behind.
            max_world_size=sum(map(str.islower, members)),
            replica_world_size=len(members),
            asked=(step, timeout),
        )

    def should_commit(self) -> str:
        """Something else that a client does."""
        return "committed"


def numbers(*answers: tuple[int, str, int]) -> list[int]:
    """The numbers of quorums, of each of which a lighthouse says a number, the members and their most merges."""
    client = Client()
    quorums = DistinctQuorums(client)
    found = []
    for answer in answers:
        client.answer = answer
        quorum = quorums._quorum(3, timeout=1.0)
        assert quorum.asked == (3, 1.0)
        found.append(quorum.quorum_id)
    return found


def test_the_number_stays_while_the_members_do() -> None:
    first, second, third = numbers((1, "ab", 0), (1, "ab", 1), (2, "ab", 1))
    assert first == second != third


def test_a_lighthouse_that_counts_anew_gives_no_number_again() -> None:
    both, alone, together = numbers((1, "ab", 0), (1, "a", 20), (2, "ab", 21))
    assert len({both, alone, together}) == 3
    # The same members and number as long before: a store may still have their addresses of then.
    first, _, again = numbers((1, "ab", 0), (2, "abc", 5), (1, "ab", 20))
    assert first != again


def test_members_with_different_pasts_agree() -> None:
    new = (1, "ab", 20)
    assert numbers((4, "ac", 7), new)[-1] == numbers((1, "b", 20), new)[-1] == numbers(new)[0]
    # One has merged alone with a new lighthouse, whose next number the other one has seen of the old one.
    assert numbers((2, "ab", 7), (2, "Ab", 8))[-1] == numbers((2, "ab", 7), (1, "b", 7), (2, "Ab", 8))[-1]


def test_all_else_is_the_clients() -> None:
    assert DistinctQuorums(Client()).should_commit() == "committed"
