"""Which engine runs the models of an agent: ranks of this node, or an inference server beside it."""

from __future__ import annotations

from functools import partial

import msgspec

from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.ranks.native import NativeEngines
from ryzanstein.worker.ranks.starting.forking import ForkServer
from ryzanstein.worker.ranks.starting.source import NewRankServer
from ryzanstein.worker.supervision.group import EngineFactory, EngineModel, GroupEvents, NewEngines


def engines_of(settings: WorkerSettings, ranks_before: int = 0, new_server: NewRankServer = ForkServer) -> NewEngines:
    """Returns the engines of an agent with these settings.

    `ranks_before` is how many ranks the agents before it have, `new_server` where its own come from.
    """

    def own(model: EngineModel, events: GroupEvents) -> EngineFactory:
        spec = msgspec.structs.replace(settings.rank_spec(model.path, ranks_before), tokens=model.token_table)
        return NativeEngines(spec, settings.tuning.ranks, events, new_server=new_server)

    return own if settings.has_ranks else _remote(settings)


def _remote(settings: WorkerSettings) -> NewEngines:
    # Imported here: a node with ranks of its own pays for no HTTP client.
    from ryzanstein.worker.engines.remote.address import EngineAddress
    from ryzanstein.worker.engines.remote.client import EngineClient
    from ryzanstein.worker.engines.remote.group import RemoteEngines, RemoteSpec

    def new_client() -> EngineClient:
        # The key is read again for each group: it may have been replaced.
        return EngineClient(EngineAddress.parse(settings.engine), settings.engine_key(), most_streams=settings.max_sequences)

    spec = RemoteSpec(
        settings.engine,
        new_client,
        settings.engine_dialect,
        settings.engine_sampler,
        settings.max_sequences,
        settings.max_tokens_per_step,
        settings.queue_settings,
        settings.tuning.engine,
    )
    return partial(RemoteEngines, spec)
