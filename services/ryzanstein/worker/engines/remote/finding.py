"""A server as settings describe it, and as it is found once it answers."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import structlog

from ryzanstein.worker.engines.asking import PROTOCOL
from ryzanstein.worker.engines.remote.answers.exact import FoundSampler, found_sampler, same_guidance
from ryzanstein.worker.engines.remote.bounds import RemoteBounds, SamplerUse
from ryzanstein.worker.engines.remote.dialects.dialect import ServedEngine
from ryzanstein.worker.engines.remote.http.client import EngineClient
from ryzanstein.worker.engines.remote.http.faults import EngineBusy, EngineFault, EngineRefused, EngineUnreachable
from ryzanstein.worker.engines.remote.probing import probe
from ryzanstein.worker.settings.rank_settings import QueueSettings
from ryzanstein.worker.supervision.group import LossCause, RankLoss, RanksLost

log = structlog.get_logger(__name__)

_SAY_AGAIN_S = 30.0
_GONE = (errno.ECONNREFUSED, errno.ENOENT)
_ITS_PACKAGES = "put on vLLM's PYTHONPATH what this node's `ryzanstein vllm-plugin` writes"


class RemoteSpec(NamedTuple):
    """A server as settings describe it.

    `new_client` connects to it. `dialect`: how it speaks, or auto. `sampler`: whether ours is to be
    used in it. `max_sequences` are sent to it at once at most; what it says
    of itself counts if that is less. `prefill_room`: prompt tokens that it takes in a step, about. `board`: where its ranks
    write how far they are; None: nowhere.
    """

    address: str
    new_client: Callable[[], EngineClient]
    dialect: str
    sampler: SamplerUse
    max_sequences: int
    prefill_room: int
    queue: QueueSettings
    bounds: RemoteBounds
    board: Path | None = None


async def found(client: EngineClient, spec: RemoteSpec, on_new: Callable[[], None]) -> ServedEngine:
    """Returns what the server is, as soon as it answers.

    `on_new` is called when it was seen to be gone, and when it answers. Raises RanksLost after `start_s`, or when it is of
    no use.
    """
    ends_s, said_s, why = time.monotonic() + spec.bounds.start_s, time.monotonic(), ""
    while time.monotonic() < ends_s:
        try:
            served = await _probed(client, spec)
        except (EngineUnreachable, EngineBusy) as error:
            why = str(error)
            if getattr(error.__cause__, "errno", None) in _GONE:
                on_new()
        except EngineFault as error:
            raise _not_started(spec, f"it cannot be used: {error}") from None
        else:
            on_new()
            sampler = "ours" if served.exact else "its own"
            log.info("engine found", engine=spec.address, version=served.version, model=served.model, sampler=sampler)
            return served
        if time.monotonic() - said_s >= _SAY_AGAIN_S:
            said_s = time.monotonic()
            log.warning("engine does not answer yet", engine=spec.address, reason=why)
        await asyncio.sleep(spec.bounds.retry_s)
    raise _not_started(spec, f"it has not answered for {spec.bounds.start_s:g} s: {why}")


async def _probed(client: EngineClient, spec: RemoteSpec) -> ServedEngine:
    served = await probe(client, spec.dialect)
    if spec.sampler == "off":
        return served
    sampler = await found_sampler(client, served)
    if sampler is not None and sampler.protocol == PROTOCOL:
        return replace(served, exact=True, constrains=_constrains(spec, sampler))
    if sampler is None:
        why = f"the {served.dialect.name} has not loaded our sampler, see docs/operate/engines.md"
    else:
        protocols = f"speaks protocol {sampler.protocol}, this node {PROTOCOL}"
        why = f"the sampler in {served.dialect.name} {protocols}: {_ITS_PACKAGES}"
    if spec.sampler == "require":
        raise EngineRefused(why)
    if sampler is not None:
        log.warning("engine is used without our sampler", engine=spec.address, reason=why)
    return served


def _constrains(spec: RemoteSpec, sampler: FoundSampler) -> bool:
    """Returns whether constraints are enforced there as on this node."""
    if same := same_guidance(sampler):
        return same
    theirs = ".".join(map(str, sampler.guidance))
    log.warning("engine takes no constraints", engine=spec.address, llguidance=theirs, help=_ITS_PACKAGES)
    return False


def _not_started(spec: RemoteSpec, why: str) -> RanksLost:
    return RanksLost(RankLoss(0, LossCause.START, f"the engine at {spec.address}: {why}"))
