"""The keys of simulated clients, in a real keys file that all routers follow.

Each client has a tenant. When its key is replaced, it uses the new one from the moment in which the old
one is revoked; both are in the file, as an operator's commands would have written them.
"""

from __future__ import annotations

import asyncio
import math
import random
import string
from dataclasses import asdict
from pathlib import Path

from ryzanstein.auth.caller import DEFAULT_SCOPES
from ryzanstein.auth.key_form import ID_CHARS, SECRET_CHARS, ApiKey
from ryzanstein.auth.keys.keys_text import key_text, revoked_text
from ryzanstein.auth.keys.records import KeyRecord
from ryzanstein.lab.simulation.planning.plan import SimulationPlan

_DIGITS = string.digits + string.ascii_letters
KNOWN_AFTER_S = 2.0
"""Routers know a change of the file, and have ended what it forbids, after this time in which they run."""


class KeyRing:
    """The keys of all clients of one simulation; without tenants in its plan there are none."""

    def __init__(self, plan: SimulationPlan, directory: Path, rng: random.Random) -> None:
        self.path = directory / "keys.toml" if plan.tenants else None
        self._rng, self._tenants = rng, plan.tenants
        self._keys: dict[int, ApiKey] = {}
        self.revoked_at: dict[str, float] = {}
        """When each key was revoked, by its text."""
        if self.path is not None:
            self.path.touch(0o600)
            self.path.write_text(_tables(plan))
            for client in plan.clients:
                self._keys[client.number] = self._add(client.number)

    def tenant_of(self, client: int) -> str:
        return f"tenant-{client % self._tenants}" if self._tenants else ""

    def key_of(self, client: int) -> str:
        """Returns the text of the client's present key; empty without keys."""
        return self._keys[client].reveal() if self._keys else ""

    def stranger_to(self, client: int) -> str:
        """Returns a key of another tenant; empty if there is none."""
        others = [number for number in self._keys if self.tenant_of(number) != self.tenant_of(client)]
        return self.key_of(others[0]) if others else ""

    def ended_before(self, key: str, now: float) -> float:
        """Returns how long ago a key was revoked; negative infinity: it was not."""
        return now - self.revoked_at.get(key, math.inf)

    async def replace(self, client: int) -> None:
        """Gives the client another key, and revokes the one that it has when all routers know the other."""
        assert self.path is not None
        new = self._add(client)
        await asyncio.sleep(2 * KNOWN_AFTER_S)
        old, self._keys[client] = self._keys[client], new
        with self.path.open("a") as file:
            file.write(revoked_text(old.key_id, 0.0))
        self.revoked_at[old.reveal()] = asyncio.get_running_loop().time()

    def _add(self, client: int) -> ApiKey:
        assert self.path is not None
        key = ApiKey(_digits(self._rng, ID_CHARS), "0" + _digits(self._rng, SECRET_CHARS - 1))
        with self.path.open("a") as file:
            file.write(key_text(KeyRecord(key.key_id, key.digest(), self.tenant_of(client), DEFAULT_SCOPES)))
        return key


def _tables(plan: SimulationPlan) -> str:
    """Returns the tables of the tenants' limits."""
    if (limits := plan.limits) is None:
        return ""
    lines = [f"{name} = {value}" for name, value in asdict(limits).items()]
    return "".join("\n".join([f"[tenant.tenant-{number}]", *lines, ""]) for number in range(plan.tenants))


def metadata(key: str) -> tuple[tuple[str, str], ...]:
    """Returns what a call with this key carries."""
    return (("authorization", f"Bearer {key}"),) if key else ()


def _digits(rng: random.Random, count: int) -> str:
    return "".join(rng.choice(_DIGITS) for _ in range(count))
