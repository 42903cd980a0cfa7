"""Costs of Gloo's collectives on a link of a given rate and latency, from costs that no link has limited.

What a rank takes to start a collective, and for each byte that it sends, is measured between hosts whose links have no
limit. On a link of a given rate, a byte takes at least the time that the link needs for it. Three things come on top:

* headers, and pauses between the messages of an all-to-all, whose ranks send to several others through one link;
* a collective that sends and receives in turns, so that one alone leaves its link idle for a part of the time;
* messages of many megabytes on a slow link, which lose packets in its queue. How many is not known before, so that
  this is only in the interval.

The factors are from the probes of `benchmarks.prediction` at 50 Mbit/s to 1 Gbit/s (its JSON files), on an Intel Xeon,
and the last one from its steps of plain DDP at 50 Mbit/s.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_gqsgd.predict.costs import Collective, Costs, Link
from lightning_gqsgd.predict.tcp import Factors, Terms

#: Seconds of a byte over those at the rate of the link: of sums and of what is gathered, and of an all-to-all between
#: two ranks and between more.
RING = 1.04
PAIRS = {2: 1.08}
MANY_PAIRS = 1.19
#: Seconds of a byte for which a collective that is alone on its link goes on, over those at the rate of the link.
TURNS = {("all_to_all", 2): 0.47, ("all_gather", 2): 0.4}
TURNS_OF_MANY_PAIRS = 0.15
#: The ends of what the bytes of a link may take, over what is predicted: nothing for headers, and lost packets.
TERMS = Terms(Factors(), Factors(1 / RING), Factors(1.1))


def on_link(costs: Costs, hosts: int, ranks_per_host: int, link: Link) -> Costs:
    """Returns the costs where each host has a link, from those of as many ranks on links without a limit."""
    made = {}
    for key, cost in costs.collectives.items():
        scope, kind = key.split()
        ranks = hosts * ranks_per_host if scope == "all" else hosts
        made[key] = (
            cost if scope == "node" else _limited(cost, kind, ranks, _through(scope, kind, hosts, ranks_per_host), link)
        )
    return replace(costs, collectives=made, terms=TERMS, latency_s=link.latency_s)


def _through(scope: str, kind: str, hosts: int, ranks_per_host: int) -> float:
    """Returns the bytes that pass the link of a host, over those that a rank sends; see `costs.collectives_between`."""
    if scope == "peers":
        return ranks_per_host
    ranks = hosts * ranks_per_host
    return ranks_per_host * (ranks - ranks_per_host) / (ranks - 1) if kind == "all_to_all" else 1.0


def _limited(cost: Collective, kind: str, ranks: int, through: float, link: Link) -> Collective:
    """Returns the cost of a collective between so many ranks, of whose bytes a multiple passes the link of a host."""
    byte_s = through / link.bytes_per_s
    factor = PAIRS.get(ranks, MANY_PAIRS) if kind == "all_to_all" else RING
    turns = TURNS.get((kind, ranks), TURNS_OF_MANY_PAIRS if kind == "all_to_all" else 0.0)
    return replace(
        cost,
        beta_s=max(cost.beta_s, factor * byte_s),
        alone_s=max(cost.alone_s, turns * byte_s),
    )
