"""The clusters that faults are tried on. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """`redis`: sessions and journal are in a Redis on a host of its own. `proxied`: routers reach each node through a delaying
    proxy on the node's host. `faked_clocks`: every service has a wall clock of its own. `saboteur`: ranks obey signals
    that make them skip a collective or compute NaN."""

    name: str
    nodes: int = 3
    tp: int = 1
    routers: int = 1
    redis: bool = False
    proxied: bool = False
    faked_clocks: bool = False
    saboteur: bool = False

    def __str__(self) -> str:
        more = (("Redis", self.redis), ("a proxy before each node", self.proxied), ("clocks of their own", self.faked_clocks))
        parts = [
            f"{self.nodes} nodes x {self.tp} rank{'s' if self.tp > 1 else ''}",
            f"{self.routers} router{'s' if self.routers > 1 else ''}",
        ]
        return ", ".join([*parts, *(text for text, there in more if there)])


PLAIN = Layout("plain")
RANKS = Layout("ranks", nodes=2, tp=2, saboteur=True)
ROUTERS = Layout("routers", routers=2, redis=True)
DISTANT = Layout("distant", proxied=True)
CLOCKS = Layout("clocks", faked_clocks=True)
