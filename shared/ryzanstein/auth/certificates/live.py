"""A set of certificates as it is now: looked at each second, and kept where a new one cannot be used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Generic, Protocol, TypeVar

import structlog

from ryzanstein.auth.certificates.files import MaterialError
from ryzanstein.auth.certificates.metrics import CertificateMetrics

log = structlog.get_logger(__name__)

LOOK_S = 1.0


class CertificateSet(Protocol):
    """What was read and checked.

    `expires`: Unix seconds by file. `life_s`: how long the service's own certificate is valid in all.
    `about`: what the log says of a new set.
    """

    @property
    def expires(self) -> Mapping[str, float]: ...

    @property
    def life_s(self) -> float: ...

    @property
    def about(self) -> Mapping[str, str]: ...


T = TypeVar("T", bound=CertificateSet)


class LiveCertificates(Generic[T]):
    """A set that is replaced while it is used.

    `read` returns the content of the files by name, `check` the set, given the one before, which is
    None at first. Both raise MaterialError; so does the constructor, if the set cannot be used then.
    """

    def __init__(
        self,
        read: Callable[[], dict[str, bytes]],
        check: Callable[[dict[str, bytes], T | None], T],
        metrics: CertificateMetrics,
    ) -> None:
        self._read, self._check, self._metrics = read, check, metrics
        self._content = read()
        self.current: T = check(self._content, None)
        self.version = 0
        """Counts the sets: a channel of an earlier one is to be replaced."""
        self._observers: list[Callable[[T], None]] = []
        self._failed: object = None
        metrics.expire(self.current.expires, self.current.life_s)

    def observe(self, changed: Callable[[T], None]) -> None:
        """Calls `changed` with each new set, in the loop. It must neither block nor raise."""
        self._observers.append(changed)

    async def run(self) -> None:
        """Looks for changes until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Takes a new set if there is one that can be used.

        Files may be replaced one by one, so a set that cannot be used counts as failed only if it is
        still the same at the next look.
        """
        try:
            content = await asyncio.to_thread(self._read)
            if content == self._content:
                self._failed = None
                return
            new = await asyncio.to_thread(self._check, content, self.current)
        except MaterialError as error:
            self._on_failure(str(error))
            return
        self._content, self.current, self._failed = content, new, None
        self.version += 1
        self._metrics.reloads.labels("ok").inc()
        self._metrics.expire(new.expires, new.life_s)
        log.info("certificates changed", **new.about)
        for changed in self._observers:
            changed(new)

    def _on_failure(self, why: str) -> None:
        before, self._failed = self._failed, (why, True)
        if before == (why, True):
            self._failed = (why, False)
            self._metrics.reloads.labels("failed").inc()
            log.error("new certificates cannot be used, the ones before are kept", error=why)
        elif before == (why, False):
            self._failed = before


def when(time_s: float) -> str:
    """Returns a Unix time for people."""
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="minutes")
