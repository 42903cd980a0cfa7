"""Numbers of quorums that stay unique when a lighthouse is restarted.

A lighthouse counts its quorums, and begins at 1 when it is started again. torchft's Manager connects to the members of
a quorum only where its number is another one than before, and members find each other in a store under that number.
With the lighthouse's own numbers, a member could go on with connections to others who are not in the quorum, or find
the addresses of an earlier one.
"""

from __future__ import annotations

from typing import Any

from lightning_gqsgd.session.opening import digest_of_facts


class DistinctQuorums:
    """torchft's client of its manager, with another number for each quorum of other members.

    Args:
        client: torchft's.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._seen: tuple[int, list[str]] | None = None
        self._number = -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def _quorum(self, *arguments: Any, **named: Any) -> Any:
        """Ask for the next quorum.

        All its members give it the same number. Where a new lighthouse comes upon the number and the members that one
        of them saw last, but another member was in a quorum without it since then, that one has made more merges, or
        one that has failed, which all are told.
        """
        quorum = self._client._quorum(*arguments, **named)
        seen = (quorum.quorum_id, list(quorum.replica_ids))
        are_level = quorum.max_world_size == quorum.replica_world_size
        if seen != self._seen or not are_level or getattr(quorum, "commit_failures", 0) > 0:
            self._seen = seen
            facts = {"number": seen[0], "members": seen[1], "merges": quorum.max_step}
            self._number = digest_of_facts(facts) % 2**62
        quorum.quorum_id = self._number
        return quorum
