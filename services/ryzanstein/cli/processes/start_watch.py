"""Decides whether a starting cluster still makes progress. A start has no time limit while something does.

Until a service answers, its processor time and its log count as progress. After that a node's own
status does: its state, and for each rank the phase and the time of its last progress (`RankProgress`).
A router that answers waits for nodes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import grpc
import psutil

from ryzanstein.cli.processes.service_process import ServiceFailedError, ServiceProcess
from ryzanstein.v1 import worker_pb2, worker_pb2_grpc
from ryzanstein.wire.enum_names import enum_name

STILL_S = 120.0
_ANSWER_S = 2.0
_POLL_S, _LOOK_EVERY_S = 0.05, 0.5
_CPU_S = 0.1
_PACE_S = 2.0


@dataclass(frozen=True, slots=True)
class Sign:
    """What a service showed: anything that differs from the last time is movement.

    `moved_s`: how long ago it moved by its own account. `doing` is for people: of a node what each model does,
    with the bytes of its weights that are done with, and how many there are; 0 of 0: they are not counted.
    """

    seen: object
    doing: Sequence[tuple[str, str, int, int]]
    moved_s: float | None = None
    failed: str = ""

    @property
    def text(self) -> str:
        return ", ".join(doing for _, doing, _, _ in self.doing)


class LoadingPace:
    """How fast weights are read, or packed, from the first look at them on."""

    def __init__(self) -> None:
        self._began: tuple[float, int, int] | None = None

    def left_s(self, done_bytes: int, total_bytes: int, now_s: float) -> float | None:
        """Returns how long the rest takes at this pace; None while that is not known."""
        if self._began is None or done_bytes < self._began[1] or total_bytes != self._began[2]:  # the first look at a model
            self._began = (now_s, done_bytes, total_bytes)
        since_s, from_bytes, _ = self._began
        if now_s - since_s < _PACE_S or done_bytes == from_bytes:
            return None
        return (total_bytes - done_bytes) * (now_s - since_s) / (done_bytes - from_bytes)


class StartWatch:
    """Watches services while they start. Call `look` often."""

    def __init__(self, services: Iterable[ServiceProcess], still_s: float = STILL_S) -> None:
        self._services, self._still_s = list(services), still_s
        self._signs: dict[str, Sign] = {}
        self._paces: defaultdict[tuple[str, str], LoadingPace] = defaultdict(LoadingPace)
        self._moved_at = time.monotonic()

    def wait(self, pending: Callable[[], list[str]], doing: Callable[[str], None] = lambda _: None) -> None:
        """Returns when `pending` names no service. `doing` is told about twice a second what they do.

        Raises ServiceFailedError, see `look`.
        """
        look_at = 0.0
        while names := pending():
            if time.monotonic() >= look_at:
                doing(self.look(names))
                look_at = time.monotonic() + _LOOK_EVERY_S
            time.sleep(_POLL_S)

    def look(self, pending: Iterable[str]) -> str:
        """Returns what the services that are not ready do, for people. `pending` are their names.

        Raises ServiceFailedError if a service ended, a node cannot serve its model, or nothing has
        moved for too long.
        """
        names = set(pending)
        for service in self._services:
            service.check_running()
            if service.name in names:
                self._see(service)
        if time.monotonic() - self._moved_at > self._still_s:
            raise ServiceFailedError(self._given_up(names))
        doing = [f"{name}: {self._doing(name, sign)}" for name, sign in self._signs.items() if name in names]
        return "; ".join(doing)

    def _doing(self, name: str, sign: Sign) -> str:
        return ", ".join(doing + self._left(name, model, done, total) for model, doing, done, total in sign.doing)

    def _left(self, name: str, model: str, done_bytes: int, total_bytes: int) -> str:
        if not total_bytes:
            return ""
        left_s = self._paces[name, model].left_s(done_bytes, total_bytes, time.monotonic())
        return "" if left_s is None else f", about {left_s:.0f} s left"

    def moved(self) -> None:
        """Records movement that the services do not show."""
        self._moved_at = time.monotonic()

    def _see(self, service: ServiceProcess) -> None:
        sign, before = _sign_of(service), self._signs.get(service.name)
        if sign.failed:
            raise ServiceFailedError(f"{service.name} cannot serve: {sign.failed}\n{service.log_tail()}")
        if before is None or sign.seen != before.seen:
            self.moved()
        elif sign.moved_s is not None:
            self._moved_at = max(self._moved_at, time.monotonic() - sign.moved_s)
        self._signs[service.name] = sign

    def _given_up(self, names: set[str]) -> str:
        slow = next(service for service in self._services if service.name in names)
        sign = self._signs[slow.name]
        text = f"{slow.name} did not become ready: nothing has moved for {self._still_s:g} s ({sign.text})"
        return f"{text}; its log, {slow.log_path}, ends with:\n{slow.log_tail()}"


def _sign_of(service: ServiceProcess) -> Sign:
    if service.kind != "worker":
        return _sign_of_process(service)
    try:
        statuses = list(_statuses(service))
    except grpc.RpcError:
        return _sign_of_process(service)
    failed = next((each.beat for each in statuses if each.beat.state == worker_pb2.NODE_STATE_FAILED), None)
    if failed is not None:
        return Sign(None, (), failed=f"{failed.model}: {failed.reason}" if failed.model else failed.reason)
    unready = [each for each in statuses if each.beat.state != worker_pb2.NODE_STATE_READY]
    ranks = [rank for each in unready for rank in each.ranks if rank.pid]
    moved_s = min((rank.since_progress.ToNanoseconds() / 1e9 for rank in ranks), default=None)
    seen = [(each.beat.model, each.beat.state, each.beat.reason, len(each.ranks), each.rank_restarts) for each in statuses]
    done = [(rank.pid, rank.phase, rank.loaded_bytes, rank.packed_bytes) for rank in ranks]
    return Sign((seen, done), list(map(_doing, unready)) or _said("waits for the others"), moved_s)


def _said(doing: str) -> Sequence[tuple[str, str, int, int]]:
    return (("", doing, 0, 0),)


def _doing(status: worker_pb2.GetStatusResponse) -> tuple[str, str, int, int]:
    """Returns a model, what its ranks do, and the bytes of weights: while some rank reads, those that are read, then packed."""
    ranks = [rank for rank in status.ranks if rank.pid]
    parts = [status.beat.reason or enum_name(worker_pb2.NodeState, status.beat.state)]
    parts += [f"rank {rank.rank} in {rank.phase}" for rank in ranks if not rank.load_bytes]
    read, to_read = sum(rank.loaded_bytes for rank in ranks), sum(rank.load_bytes for rank in ranks)
    packed, to_pack = sum(rank.packed_bytes for rank in ranks), sum(rank.pack_bytes for rank in ranks)
    packs = to_pack > 0 and read == to_read
    done, total, verb = (packed, to_pack, "packed") if packs else (read, to_read, "read")
    if total:
        parts.append(f"{done / total:.0%} of {total / 2**20:.0f} MiB {verb}")
    return status.beat.model, ", ".join(parts), done, total


def _statuses(service: ServiceProcess) -> Iterator[worker_pb2.GetStatusResponse]:
    """Yields the node's status of each model, the first one first."""
    with service.dial() as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        first = stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=_ANSWER_S)
        yield first
        for model in first.beat.other_models:
            yield stub.GetStatus(worker_pb2.GetStatusRequest(model=model), timeout=_ANSWER_S)


def _sign_of_process(service: ServiceProcess) -> Sign:
    """Returns the sign of a service that says nothing of itself: it imports, or waits for nodes."""
    if service.serves(""):
        return Sign("answers", _said("waits for nodes"))
    try:
        times = psutil.Process(service.pid).cpu_times()
        spent = round((times.user + times.system) / _CPU_S)
    except psutil.Error:
        spent = 0
    size = service.log_path.stat().st_size if service.log_path.exists() else 0
    return Sign((spent, size), _said("starts"))
