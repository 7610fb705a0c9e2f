"""DebugService, the same for every service: stacks, requests and settings of the one that answers."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from grpc.aio import ServicerContext
from prometheus_client import CollectorRegistry, generate_latest

from ryzanstein.config import ServiceSettings
from ryzanstein.observe.requests import FoundRequest
from ryzanstein.observe.stacks import task_stacks, thread_stacks
from ryzanstein.observe.threads import cpu_since, threads_of
from ryzanstein.v1 import debug_pb2 as pb
from ryzanstein.v1.debug_pb2_grpc import DebugServiceServicer
from ryzanstein.wire.debug import found_to_wire, query_from_wire, task_to_wire
from ryzanstein.wire.timestamps import duration

WATCHED_S = 0.2
MAX_WATCHED_S = 1.0
_LIBRARIES = ("ryzanstein", "grpcio", "protobuf", "torch", "numpy", "tokenizers", "msgspec", "prometheus_client", "pydantic")
_PASSWORD = re.compile(r"(?<=//)[^/@\s]*@")
_SECRET = re.compile(r"(?:^|_)(?:secret|password|token)(?:_|$)")

Context = ServicerContext[Any, Any]


async def _nothing_more(watched_s: float, answer: pb.DumpStacksResponse) -> None: ...


@dataclass(frozen=True, slots=True)
class DebugSource:
    """What one service shows. `name` is its id.

    `requests` returns what has not ended; `add_stacks` adds the processes and autopsies of its models.
    """

    service: str
    name: str
    settings: ServiceSettings
    registry: CollectorRegistry
    requests: Callable[[], Iterable[FoundRequest]] = tuple
    add_stacks: Callable[[float, pb.DumpStacksResponse], Awaitable[None]] = field(default=_nothing_more)


class DebugServicer(DebugServiceServicer):
    """`DebugService` over what a service shows."""

    def __init__(self, source: DebugSource) -> None:
        self._source = source

    async def DumpStacks(self, request: pb.DumpStacksRequest, context: Context) -> pb.DumpStacksResponse:
        wanted_s = request.watched.ToNanoseconds() / 1e9 if request.HasField("watched") else WATCHED_S
        watched_s = min(MAX_WATCHED_S, max(0.0, wanted_s))
        answer = pb.DumpStacksResponse()
        own, _ = await asyncio.gather(_own(self._source.name, watched_s), self._source.add_stacks(watched_s, answer))
        answer.processes.insert(0, own)
        answer.tasks.extend(map(task_to_wire, task_stacks()))
        return answer

    async def FindRequests(self, request: pb.FindRequestsRequest, context: Context) -> pb.FindRequestsResponse:
        requests = list(self._source.requests())
        found = query_from_wire(request).of(requests)
        return pb.FindRequestsResponse(requests=map(found_to_wire, found), total=len(requests))

    async def GetDiagnostics(self, request: pb.GetDiagnosticsRequest, context: Context) -> pb.GetDiagnosticsResponse:
        source = self._source
        metrics = await asyncio.to_thread(generate_latest, source.registry)
        return pb.GetDiagnosticsResponse(
            service=source.service,
            name=source.name,
            versions={"python": platform.python_version(), "linux": platform.release(), **_versions(_LIBRARIES)},
            settings=json.dumps(without_secrets(source.settings.model_dump(mode="json"))),
            metrics=metrics.decode(),
        )


async def _own(name: str, watched_s: float) -> pb.ProcessStacks:
    """Returns the threads of this process, which is one that runs."""
    before = {thread.tid: thread.cpu_s for thread in threads_of(os.getpid())}
    await asyncio.sleep(watched_s)
    stacks = {each.tid: each for each in thread_stacks()}
    return pb.ProcessStacks(
        name=name,
        pid=os.getpid(),
        threads=[
            pb.ThreadStack(
                tid=thread.tid,
                name=stacks[thread.tid].name if thread.tid in stacks else thread.name,
                state=thread.state,
                waits_in=thread.waits_in,
                cpu=duration(cpu_since(before, thread)),
                stack=stacks[thread.tid].stack if thread.tid in stacks else "",
            )
            for thread in threads_of(os.getpid())
        ],
    )


def without_secrets(settings: Any) -> Any:
    """Returns settings with the passwords of addresses, and whatever is called a secret, replaced."""
    match settings:
        case dict():
            return {
                name: "**********" if isinstance(value, str) and value and _SECRET.search(name) else without_secrets(value)
                for name, value in settings.items()
            }
        case list():
            return [without_secrets(each) for each in settings]
        case str():
            return _PASSWORD.sub("**********@", settings)
    return settings


def _versions(names: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
