"""The adapters that are registered for a model on this node, by their public names.

An adapter is registered when its files were read and checked as a whole: so a request finds out nothing about
them that the operator was not told. It then stays out of memory until it is asked for, see `residency`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from ryzanstein import errors
from ryzanstein.adapters import MAX_ADAPTERS, NodeAdapter
from ryzanstein.generation.request import AdapterRef

log = structlog.get_logger(__name__)

REPLACED_FOR_S = 60.0
"""How long an adapter that was replaced may still be asked for: routers may have sent requests meanwhile."""


class PackedSize(Protocol):
    """What checking an adapter finds out: the digest of its content, and its bytes in the memory of ranks."""

    @property
    def digest(self) -> bytes: ...

    @property
    def num_bytes(self) -> int: ...


Check = Callable[[str, Path], Awaitable[PackedSize]]
"""Reads an adapter of this name. Raises ADAPTER_UNFIT."""


@dataclass(frozen=True, slots=True)
class RegisteredAdapter:
    """An adapter whose files fit the model. `pinned`: it is not evicted from memory."""

    ref: AdapterRef
    path: Path
    num_bytes: int
    revision: int = 0
    pinned: bool = False


class AdapterRegistry:
    """`is_resident` says which are in memory."""

    def __init__(self, check: Check, is_resident: Callable[[bytes], bool]) -> None:
        self._check, self._is_resident = check, is_resident
        self._by_name: dict[str, RegisteredAdapter] = {}
        self._names: dict[bytes, dict[str, None]] = {}
        self._replaced: dict[bytes, tuple[RegisteredAdapter, float]] = {}
        self._adding = asyncio.Lock()

    def __iter__(self) -> Iterator[RegisteredAdapter]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, name: str) -> RegisteredAdapter | None:
        return self._by_name.get(name)

    def find(self, ref: AdapterRef) -> RegisteredAdapter | None:
        """Returns the adapter with this content, also one that was replaced a moment ago."""
        named = self._by_name.get(ref.name)
        if named is not None and named.ref.digest == ref.digest:
            return named
        alike = self.with_content(ref.digest)
        return alike[0] if alike else self._lately_replaced().get(ref.digest)

    def with_content(self, digest: bytes) -> list[RegisteredAdapter]:
        """Returns the adapters that are registered with this content, under whatever names."""
        return [self._by_name[name] for name in self._names.get(digest, ())]

    def is_pinned(self, digest: bytes) -> bool:
        """Returns whether an adapter with this content is kept in memory."""
        return any(each.pinned for each in self.with_content(digest))

    @property
    def replaced(self) -> list[AdapterRef]:
        """The adapters that requests may still ask for by their content, though their names stand for others now."""
        return [each.ref for each in self._lately_replaced().values()]

    def report(self, adapter: RegisteredAdapter) -> NodeAdapter:
        """Returns what routers are told of an adapter."""
        return NodeAdapter(adapter.ref, adapter.revision, self._is_resident(adapter.ref.digest))

    async def add(self, name: str, path: Path, *, revision: int = 0, pinned: bool = False) -> RegisteredAdapter:
        """Registers an adapter, in place of one of the same name; returns it when it is in force.

        Raises ADAPTER_UNFIT, and then what was registered stays; RESOURCE_EXHAUSTED over the bound.
        """
        async with self._adding:
            if name not in self._by_name and len(self._by_name) >= MAX_ADAPTERS:
                raise errors.RyzansteinError(
                    f"too many adapters: the bound is {MAX_ADAPTERS} of a model",
                    errors.Code.RESOURCE_EXHAUSTED,
                    "TOO_MANY_ADAPTERS",
                    {"bound": str(MAX_ADAPTERS)},
                )
            found = await self._check(name, path)
            before = self._by_name.get(name)
            number = revision or (1 if before is None else before.revision + (before.ref.digest != found.digest))
            added = RegisteredAdapter(AdapterRef(name, found.digest), path, found.num_bytes, number, pinned)
            self._forget(name)
            self._by_name[name] = added
            self._names.setdefault(found.digest, {})[name] = None
        if before is not None and before.ref.digest != found.digest:
            self._replaced[before.ref.digest] = (before, time.monotonic() + REPLACED_FOR_S)
        log.info("adapter registered", adapter=name, digest=found.digest.hex()[:12], bytes=found.num_bytes, revision=number)
        return added

    def remove(self, name: str) -> RegisteredAdapter | None:
        """Refuses new requests for the adapter; what runs with it ends. Returns it, None if there was none."""
        removed = self._forget(name)
        if removed is not None:
            log.info("adapter removed", adapter=name, digest=removed.ref.digest.hex()[:12])
        return removed

    def _forget(self, name: str) -> RegisteredAdapter | None:
        forgotten = self._by_name.pop(name, None)
        if forgotten is not None:
            names = self._names[forgotten.ref.digest]
            del names[name]
            if not names:
                del self._names[forgotten.ref.digest]
        return forgotten

    def _lately_replaced(self) -> dict[bytes, RegisteredAdapter]:
        now = time.monotonic()
        self._replaced = {digest: each for digest, each in self._replaced.items() if each[1] > now}
        return {digest: adapter for digest, (adapter, _) in self._replaced.items()}
