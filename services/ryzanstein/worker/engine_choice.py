"""Which engine runs the models of an agent: ranks of this node, or an inference server beside it."""

from __future__ import annotations

import msgspec

from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.ranks.native import NativeEngines
from ryzanstein.worker.ranks.starting.forking import ForkServer
from ryzanstein.worker.ranks.starting.source import NewRankServer
from ryzanstein.worker.supervision.group import EngineFactory, GroupEvents, NewEngines


def engines_of(settings: WorkerSettings, ranks_before: int = 0, new_server: NewRankServer = ForkServer) -> NewEngines:
    """Returns the engines of an agent with these settings.

    `ranks_before` is how many ranks the agents before it have, `new_server` where its own come from.
    """

    def own(model: str, events: GroupEvents, tokens: bytes) -> EngineFactory:
        spec = msgspec.structs.replace(settings.rank_spec(model, ranks_before), tokens=tokens)
        return NativeEngines(spec, settings.tuning.ranks, events, new_server=new_server)

    return own
