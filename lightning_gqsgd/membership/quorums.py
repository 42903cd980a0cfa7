"""Numbers of quorums that stay unique when a lighthouse is restarted.

A lighthouse counts its quorums, and starts at 1 again after a restart. torchft's Manager connects to the members of a
quorum only if the quorum's number has changed, and members find each other in a store under that number. With the
lighthouse's own numbers, a member could keep connections to members that are not in the quorum, or find the addresses
of an earlier quorum.
"""

from __future__ import annotations

from typing import Any

from lightning_gqsgd.session.opening import digest_of_facts


class DistinctQuorums:
    """Wraps torchft's client of its manager, and gives each quorum of different members a different number.

    Args:
        client: torchft's client.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._seen: tuple[int, list[str]] | None = None
        self._number = -1

    @property
    def members(self) -> set[str]:
        """The members of the latest quorum."""
        return set(self._seen[1]) if self._seen is not None else set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def _quorum(self, *arguments: Any, **named: Any) -> Any:
        """Ask for the next quorum.

        All its members compute the same number. A new lighthouse may repeat the number and the members that one member
        saw last, while another member was in a quorum without it since then. That other member has made more merges, or
        a failed merge, and the quorum tells this to all members.
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
