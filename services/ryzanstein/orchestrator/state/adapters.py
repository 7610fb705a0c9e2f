"""The adapters that should be registered on the nodes of their models, by name. Each was written to the store before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b

from ryzanstein import errors
from ryzanstein.adapters import MAX_ADAPTERS, DeployedAdapter

MAX_TEXT_CHARS = 2**20
"""Of all names and paths together: they are one message."""


class AdapterTable:
    """What nodes are told as a whole whenever it changes: `digest` says whether they know it."""

    def __init__(self, saved: Iterable[DeployedAdapter] = ()) -> None:
        self._by_name = {adapter.name: adapter for adapter in saved}
        self._removed: dict[str, int] = {}
        self._known: bytes | None = None

    def all(self) -> tuple[DeployedAdapter, ...]:
        """Returns all adapters, by name."""
        return tuple(self._by_name[name] for name in sorted(self._by_name))

    def find(self, name: str) -> DeployedAdapter | None:
        return self._by_name.get(name)

    @property
    def digest(self) -> bytes:
        """The same for the same adapters, at any orchestrator; empty for none."""
        if self._known is None:
            text = "\0".join(repr(adapter) for adapter in self.all())
            self._known = blake2b(text.encode(), digest_size=8).digest() if self._by_name else b""
        return self._known

    def revised(self, adapter: DeployedAdapter) -> DeployedAdapter:
        """Returns the adapter with its revision, one more than before. Raises RESOURCE_EXHAUSTED over the bounds."""
        before = self._by_name.get(adapter.name)
        others = [each for each in self._by_name.values() if each is not before]
        chars = sum(len(each.name) + len(each.path) + len(each.model) for each in (*others, adapter))
        if len(others) >= MAX_ADAPTERS or chars > MAX_TEXT_CHARS:
            raise errors.RyzansteinError(
                f"too many adapters: the bounds are {MAX_ADAPTERS}, and {MAX_TEXT_CHARS} characters of names and paths",
                errors.Code.RESOURCE_EXHAUSTED,
                "TOO_MANY_ADAPTERS",
                {"bound": str(MAX_ADAPTERS)},
            )
        last = self._removed.get(adapter.name, 0) if before is None else before.revision
        return replace(adapter, revision=last + 1)

    def put(self, adapter: DeployedAdapter) -> None:
        self._by_name[adapter.name] = adapter
        self._known = None

    def require(self, name: str) -> DeployedAdapter:
        """Returns the adapter. Raises NOT_FOUND when there is none."""
        if name not in self._by_name:
            raise errors.not_found("adapter", name)
        return self._by_name[name]

    def remove(self, name: str) -> None:
        """Removes an adapter. Its revisions are not given again: nodes may still have it."""
        self._removed[name] = self._by_name.pop(name).revision
        while len(self._removed) > MAX_ADAPTERS:
            del self._removed[next(iter(self._removed))]
        self._known = None
