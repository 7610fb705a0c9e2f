"""Reads adapters in threads, beside the event loop.

They are checked when they are registered, and packed when they are loaded.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ryzanstein.worker.adapters.packing import packed_bytes, write_packed
from ryzanstein.worker.adapters.reading import AdapterUnfit, digest_of, read_adapter

from ryzanstein import errors
from ryzanstein.worker.agent.adapters.registry import RegisteredAdapter

MAX_PACKED_AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class CheckedAdapter:
    """What is known of an adapter that fits: the digest of its content, and its bytes when it is packed."""

    digest: bytes
    num_bytes: int


class AdapterFiles:
    """Adapters of a model with the weights `adaptable`, by name, of (inputs, outputs). None until ranks were ready once."""

    def __init__(self) -> None:
        self.adaptable: Mapping[str, tuple[int, int]] | None = None
        self._reading = asyncio.Semaphore(MAX_PACKED_AT_ONCE)

    async def check(self, name: str, path: Path) -> CheckedAdapter:
        """Reads the whole adapter. Raises ADAPTER_UNFIT; UNAVAILABLE before the first ranks are ready."""
        adaptable = self._known()
        async with self._reading:
            return await asyncio.to_thread(_checked, name, path, adaptable)

    async def pack(self, adapter: RegisteredAdapter) -> int:
        """Returns a descriptor of the packed adapter in memory.

        Raises ADAPTER_UNFIT where the files are no longer what was registered.
        """
        adaptable = self._known()
        async with self._reading:
            return await asyncio.to_thread(_packed, adapter, adaptable)

    def _known(self) -> Mapping[str, tuple[int, int]]:
        if self.adaptable is None:
            raise errors.unavailable("NODE_NOT_READY", "the model's weights are not known before its ranks are ready")
        return self.adaptable


def _checked(name: str, path: Path, adaptable: Mapping[str, tuple[int, int]]) -> CheckedAdapter:
    try:
        digest = bytes.fromhex(digest_of(path))
        return CheckedAdapter(digest, packed_bytes(read_adapter(path, adaptable)))
    except AdapterUnfit as unfit:
        raise errors.adapter_unfit(name, unfit.field, unfit.why) from None


def _packed(registered: RegisteredAdapter, adaptable: Mapping[str, tuple[int, int]]) -> int:
    name = registered.ref.name
    try:
        if bytes.fromhex(digest_of(registered.path)) != registered.ref.digest:
            raise errors.adapter_unfit(name, "files", "have changed since the adapter was registered")
        adapter = read_adapter(registered.path, adaptable)
    except AdapterUnfit as unfit:
        raise errors.adapter_unfit(name, unfit.field, unfit.why) from None
    fd = os.memfd_create(f"adapter-{name}"[:200], os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            write_packed(adapter, file)
    except BaseException:
        os.close(fd)
        raise
    return fd
