"""Which engine runs the models of an agent: ranks of this node, or an inference server beside it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.ranks.native import NativeEngines
from ryzanstein.worker.ranks.starting.forking import ForkServer
from ryzanstein.worker.ranks.starting.source import NewRankServer
from ryzanstein.worker.supervision.group import EngineFactory, EngineModel, GroupEvents, NewEngines

if TYPE_CHECKING:
    from ryzanstein.worker.engines.remote.finding import RemoteSpec


def engines_of(settings: WorkerSettings, ranks_before: int = 0, new_server: NewRankServer = ForkServer) -> NewEngines:
    """Returns the engines of an agent with these settings.

    `ranks_before` is how many ranks the agents before it have, `new_server` where its own come from.
    """

    def own(model: EngineModel, events: GroupEvents) -> EngineFactory:
        spec = msgspec.structs.replace(settings.rank_spec(model.path, ranks_before), tokens=model.token_table)
        return NativeEngines(spec, settings.tuning.ranks, events, new_server=new_server)

    if settings.has_ranks:
        return own
    return _child(settings) if settings.starts_engine else _remote(settings)


def _child(settings: WorkerSettings) -> NewEngines:
    from ryzanstein.worker.engines.child.command import board, can_sleep, vllm_command, vllm_environment
    from ryzanstein.worker.engines.child.group import ChildEngines, ChildSpec

    def socket(folder: Path) -> Path:
        return folder / "socket"

    def command(model: EngineModel, folder: Path) -> Sequence[str]:
        return vllm_command(
            settings.engine_python,
            model.path,
            socket(folder),
            tp=settings.tp,
            max_sequences=settings.max_sequences,
            arguments=settings.engine_arguments(),
        )

    def remote(folder: Path) -> RemoteSpec:
        return _spec(settings, f"unix://{socket(folder)}", board(folder))

    sleeps = can_sleep(settings.engine_arguments())
    return partial(ChildEngines, ChildSpec(command, partial(vllm_environment, sleeps=sleeps), remote, sleeps))


def _remote(settings: WorkerSettings) -> NewEngines:
    # Imported here: a node with ranks of its own pays for no HTTP client.
    from ryzanstein.worker.engines.remote.group import RemoteEngines

    return partial(RemoteEngines, _spec(settings, settings.engine, settings.engine_board))


def _spec(settings: WorkerSettings, address: str, board: Path | None) -> RemoteSpec:
    from ryzanstein.worker.engines.remote.finding import RemoteSpec
    from ryzanstein.worker.engines.remote.http.address import EngineAddress
    from ryzanstein.worker.engines.remote.http.client import EngineClient

    def new_client() -> EngineClient:
        # The key is read again for each group: it may have been replaced.
        return EngineClient(EngineAddress.parse(address), settings.engine_key(), most_streams=settings.max_sequences)

    return RemoteSpec(
        address=address,
        new_client=new_client,
        dialect=settings.engine_dialect,
        sampler=settings.engine_sampler,
        max_sequences=settings.max_sequences,
        prefill_room=settings.max_tokens_per_step,
        queue=settings.queue_settings,
        bounds=settings.tuning.engine,
        board=board,
    )
