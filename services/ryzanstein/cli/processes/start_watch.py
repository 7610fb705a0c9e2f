"""Decides whether a starting cluster still makes progress. A start has no time limit while something does.

Until a service answers, its processor time and its log count as progress. After that a node's own
status does: its state, and for each rank the phase and the time of its last progress (`RankProgress`).
A router that answers waits for nodes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
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

    `moved_s`: how long ago it moved by its own account. `doing` is for people. `read`: bytes of weights
    that are read, and how many there are.
    """

    seen: object
    doing: str
    moved_s: float | None = None
    failed: str = ""
    read: tuple[int, int] = (0, 0)


class ReadingPace:
    """How fast weights are read, from the first look at them on."""

    def __init__(self) -> None:
        self._began: tuple[float, int, int] | None = None

    def left_s(self, loaded_bytes: int, total_bytes: int, now_s: float) -> float | None:
        """Returns how long the rest takes at this pace; None while that is not known."""
        if self._began is None or loaded_bytes < self._began[1] or total_bytes != self._began[2]:  # the first look at a model
            self._began = (now_s, loaded_bytes, total_bytes)
        since_s, from_bytes, _ = self._began
        if now_s - since_s < _PACE_S or loaded_bytes == from_bytes:
            return None
        return (total_bytes - loaded_bytes) * (now_s - since_s) / (loaded_bytes - from_bytes)


class StartWatch:
    """Watches services while they start. Call `look` often."""

    def __init__(self, services: Iterable[ServiceProcess], still_s: float = STILL_S) -> None:
        self._services, self._still_s = list(services), still_s
        self._signs: dict[str, Sign] = {}
        self._readings: defaultdict[str, ReadingPace] = defaultdict(ReadingPace)
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
        doing = [f"{name}: {sign.doing}{self._left(name, sign)}" for name, sign in self._signs.items() if name in names]
        return "; ".join(doing)

    def _left(self, name: str, sign: Sign) -> str:
        if not sign.read[1]:
            return ""
        left_s = self._readings[name].left_s(*sign.read, time.monotonic())
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
        text = f"{slow.name} did not become ready: nothing has moved for {self._still_s:g} s ({sign.doing})"
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
        return Sign(None, "", failed=f"{failed.model}: {failed.reason}" if failed.model else failed.reason)
    unready = [each for each in statuses if each.beat.state != worker_pb2.NODE_STATE_READY]
    ranks = [rank for each in unready for rank in each.ranks if rank.pid]
    moved_s = min((rank.since_progress.ToNanoseconds() / 1e9 for rank in ranks), default=None)
    seen = [(each.beat.model, each.beat.state, each.beat.reason, len(each.ranks), each.rank_restarts) for each in statuses]
    return Sign(
        (seen, [(rank.pid, rank.phase, rank.loaded_bytes) for rank in ranks]), _doing(unready), moved_s, read=_read(unready)
    )


def _doing(unready: list[worker_pb2.GetStatusResponse]) -> str:
    parts = []
    loaded, total = _read(unready)
    for each in unready[:1]:
        parts.append(each.beat.reason or enum_name(worker_pb2.NodeState, each.beat.state))
        parts += [f"rank {rank.rank} in {rank.phase}" for rank in each.ranks if rank.pid and not rank.load_bytes]
        if total:
            parts.append(f"{loaded / total:.0%} of {total / 2**20:.0f} MiB read")
    return ", ".join(parts) or "waits for the others"


def _read(unready: list[worker_pb2.GetStatusResponse]) -> tuple[int, int]:
    """Returns the bytes of weights that the ranks of the first model have read, and those that they read in all."""
    ranks = [rank for each in unready[:1] for rank in each.ranks]
    return sum(rank.loaded_bytes for rank in ranks), sum(rank.load_bytes for rank in ranks)


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
        return Sign("answers", "waits for nodes")
    try:
        times = psutil.Process(service.pid).cpu_times()
        spent = round((times.user + times.system) / _CPU_S)
    except psutil.Error:
        spent = 0
    size = service.log_path.stat().st_size if service.log_path.exists() else 0
    return Sign((spent, size), "starts")
