"""The clusters that faults are tried on. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """The layout of a cluster.

    - `redis`: sessions and journal are in a Redis on a separate host.
    - `proxied`: routers reach each node through a delaying proxy on the node's host.
    - `faked_clocks`: every service has a separate wall clock.
    - `saboteur`: ranks obey signals that make them skip a collective, compute NaN or take long.
    - `step_s`: during a run each step takes this much longer, and clients request long answers.
    - `fast_clock`: all services share a clock that can run faster.
    - `further_models`: names of models that every node serves besides the demo model.
    - `forms`: clients request objects and calls, and streams over WebSocket.
    - `context`: nodes serve a random model with a context of so many tokens instead of the demo model.
    - `secure`: services talk to each other with TLS alone, and clients have a key.
    - `servers`: so many nodes, the first ones, stand beside llama.cpp servers; the others are in reserve.
    - `adapters`: names of adapters of the demo model that every node has.
    - `tiers`: nodes keep pages on disk; with a network it is a separate disk that is small enough to fill.
    """

    name: str
    nodes: int = 3
    tp: int = 1
    routers: int = 1
    redis: bool = False
    proxied: bool = False
    faked_clocks: bool = False
    saboteur: bool = False
    step_s: float = 0.0
    fast_clock: bool = False
    further_models: tuple[str, ...] = ()
    forms: bool = False
    context: int = 0
    tiers: bool = False
    adapters: tuple[str, ...] = ()
    secure: bool = False
    servers: int = 0

    def __str__(self) -> str:
        more = (
            ("Redis", self.redis),
            ("a proxy in front of each node", self.proxied),
            ("separate clocks", self.faked_clocks),
            ("a fast clock", self.fast_clock),
            ("long answers", self.step_s > 0),
            ("objects and calls", self.forms),
            (f"a context of {self.context}", self.context > 0),
            ("pages on disk", self.tiers),
            ("an adapter", bool(self.adapters)),
            ("TLS and keys", self.secure),
            (f"{self.servers} beside llama.cpp", self.servers > 0),
        )
        parts = [
            f"{self.nodes} node{'s' if self.nodes > 1 else ''} x {self._models}{self.tp} rank{'s' if self.tp > 1 else ''}",
            f"{self.routers} router{'s' if self.routers > 1 else ''}",
        ]
        return ", ".join([*parts, *(text for text, there in more if there)])

    @property
    def _models(self) -> str:
        return f"{1 + len(self.further_models)} models x " if self.further_models else ""


PLAIN = ClusterLayout("plain")
RANKS = ClusterLayout("ranks", nodes=2, tp=2, saboteur=True)
MODELS = ClusterLayout("models", nodes=2, further_models=("second",))
ROUTERS = ClusterLayout("routers", routers=2, redis=True)
FORMS = ClusterLayout("forms", routers=2, redis=True, forms=True)
DISTANT = ClusterLayout("distant", proxied=True)
CLOCKS = ClusterLayout("clocks", faked_clocks=True)
IDLE = ClusterLayout("idle", nodes=2, tp=2, saboteur=True, fast_clock=True)
CONTEXT = ClusterLayout("context", nodes=2, context=32_768)
SERVERS = ClusterLayout("servers", servers=2)
ADAPTED = ClusterLayout("adapted", adapters=("tuned",))
TIERS = ClusterLayout("tiers", nodes=2, tiers=True)
# A thousand tokens: a minute and more.
LONG = ClusterLayout("long", step_s=0.064)
ALONE = ClusterLayout("alone", nodes=1, tp=2, saboteur=True, step_s=0.076)
