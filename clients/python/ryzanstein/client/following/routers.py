"""Which router a client asks: the same one until it fails, then another, and a failed one not for a while."""

from __future__ import annotations

import random
from collections.abc import Sequence

_FIRST_AVOIDED_S, _LONGEST_AVOIDED_S = 1.0, 15.0


class RouterChoice:
    """The routers of one client, in an order of its own: many clients do not all ask the first one.

    All times are of one monotonic clock, in seconds.
    """

    def __init__(self, addresses: Sequence[str], rng: random.Random) -> None:
        """Raises ValueError without addresses."""
        if not addresses:
            raise ValueError("routers: name at least one, as host:port")
        self._rng = rng
        self.given = self.addresses = tuple(rng.sample(list(dict.fromkeys(addresses)), len(dict.fromkeys(addresses))))
        self._current = self.addresses[0]
        self._avoided: dict[str, tuple[float, float]] = {}
        self.failures: dict[str, str] = {}

    @property
    def learned(self) -> tuple[str, ...]:
        """Returns the routers that nobody gave: other routers named them, and they answered."""
        return self.addresses[len(self.given) :]

    def learn(self, address: str) -> None:
        """Adds a router, somewhere behind those that were given."""
        if address not in self.addresses:
            at = self._rng.randint(len(self.given), len(self.addresses))
            self.addresses = (*self.addresses[:at], address, *self.addresses[at:])

    def forget(self, address: str) -> None:
        """Removes a router that was learned."""
        if address in self.learned:
            self.addresses = tuple(each for each in self.addresses if each != address)
            self.answered(address)
            if self._current == address:
                self._current = self.addresses[0]

    def current(self, now: float) -> str:
        """Returns the router to ask now: of those that are avoided the one that failed first, if all are."""
        if self._is_avoided(self._current, now):
            self._current = self._following(now)
        return self._current

    def failed(self, address: str, now: float, why: str) -> None:
        """Avoids a router that does not answer: for a second, twice as long each time."""
        _, lasted_s = self._avoided.get(address, (0.0, _FIRST_AVOIDED_S / 2))
        lasts_s = min(_LONGEST_AVOIDED_S, lasted_s * 2)
        self._avoided[address] = (now + lasts_s, lasts_s)
        self.failures[address] = why

    def answered(self, address: str) -> None:
        """Forgets the failures of a router."""
        if self._avoided:
            self._avoided.pop(address, None)
            self.failures.pop(address, None)

    def leave(self, address: str, now: float) -> None:
        """Asks another router next, if there is one: this one answered that it cannot help."""
        if self._current == address:
            others = self._from(address)
            self._current = next(
                (other for other in others if not self._is_avoided(other, now)), others[0] if others else address
            )

    def _from(self, address: str) -> list[str]:
        at = self.addresses.index(address) if address in self.addresses else 0
        return [*self.addresses[at + 1 :], *self.addresses[:at]]

    def _following(self, now: float) -> str:
        others = [*self._from(self._current), self._current]
        free = next((other for other in others if not self._is_avoided(other, now)), None)
        return free or min(others, key=lambda other: self._avoided[other][0])

    def _is_avoided(self, address: str, now: float) -> bool:
        until, _ = self._avoided.get(address, (0.0, 0.0))
        return now < until
