"""Reads adapters in threads, beside the event loop.

They are checked when they are registered, and packed when they are loaded.
"""

from __future__ import annotations

import asyncio
import errno
import os
from dataclasses import dataclass
from pathlib import Path

from ryzanstein import errors
from ryzanstein.worker.adapters.digest import digest_of
from ryzanstein.worker.adapters.factors import Adapter, Shapes
from ryzanstein.worker.adapters.packing import packed_bytes, write_packed
from ryzanstein.worker.adapters.reading import read_adapter
from ryzanstein.worker.adapters.unfit import AdapterUnfit
from ryzanstein.worker.agent.adapters.registry import RegisteredAdapter

MAX_READ_AT_ONCE = 2
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC}
MAX_RESIDENT = 512
"""In memory at once: each keeps a file descriptor."""


@dataclass(frozen=True, slots=True)
class AdaptedModel:
    """The model that adapters change: its directory, and the names and shapes of its weights.

    `half`: they are rounded, so adapters take 16 bits.
    """

    path: Path
    adaptable: Shapes
    half: bool = False


@dataclass(frozen=True, slots=True)
class CheckedAdapter:
    """What is known of an adapter that fits: the digest of its content, and its bytes when it is packed."""

    digest: bytes
    num_bytes: int


class AdapterFiles:
    """Adapters of a model. What it is becomes known when its ranks are ready for the first time.

    `max_bytes`: the memory for adapters.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.base: AdaptedModel | None = None
        self._reading = asyncio.Semaphore(MAX_READ_AT_ONCE)

    async def check(self, name: str, path: Path) -> CheckedAdapter:
        """Reads the whole adapter.

        Raises ADAPTER_UNFIT; ADAPTER_NO_ROOM if it alone is too large; UNAVAILABLE before the first ranks are ready.
        """
        base = self._known()
        async with self._reading:
            checked = await asyncio.to_thread(_checked, name, path, base)
        if checked.num_bytes > self._max_bytes:
            raise errors.adapter_no_room(name, checked.num_bytes, self._max_bytes, MAX_RESIDENT)
        return checked

    async def pack(self, adapter: RegisteredAdapter) -> int:
        """Returns a descriptor of the packed adapter in memory.

        Raises ADAPTER_UNFIT where the files are no longer what was registered.
        """
        base = self._known()
        async with self._reading:
            return await asyncio.to_thread(_packed, adapter, base)

    def _known(self) -> AdaptedModel:
        if self.base is None:
            raise errors.unavailable("NODE_NOT_READY", "the model's weights are not known before its ranks are ready")
        return self.base


def _read(name: str, path: Path, base: AdaptedModel) -> tuple[bytes, Adapter]:
    """Returns the digest of an adapter's content, and the adapter.

    Raises ADAPTER_UNFIT; ADAPTER_NOT_SERVED where only the node is short of something.
    """
    try:
        digest = digest_of(path)
        adapter = read_adapter(path, base.adaptable, base.path)
    except (AdapterUnfit, OSError, MemoryError) as error:
        if (shortage := _shortage(error)) is not None:
            raise _short(name, shortage) from None
        if isinstance(error, AdapterUnfit):
            raise errors.adapter_unfit(name, error.where or "files", error.message) from None
        raise errors.adapter_unfit(name, "files", str(error)) from None
    return bytes.fromhex(digest), adapter


def _shortage(error: BaseException | None) -> OSError | MemoryError | None:
    """Returns the error of this machine that lies behind an error, if it says nothing of the files."""
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _SHORTAGES):
            return error
        error = error.__cause__
    return None


def _checked(name: str, path: Path, base: AdaptedModel) -> CheckedAdapter:
    digest, adapter = _read(name, path, base)
    return CheckedAdapter(digest, packed_bytes(adapter, half=base.half))


def _packed(registered: RegisteredAdapter, base: AdaptedModel) -> int:
    name = registered.ref.name
    digest, adapter = _read(name, registered.path, base)
    if digest != registered.ref.digest:
        raise errors.adapter_unfit(name, "files", "have changed since the adapter was registered")
    try:
        fd = os.memfd_create(f"adapter-{digest.hex()[:16]}", os.MFD_CLOEXEC)
    except OSError as error:
        raise _short(name, error) from None
    try:
        with open(fd, "wb", closefd=False) as file:
            write_packed(adapter, file, half=base.half)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, AdapterUnfit):
            raise errors.adapter_unfit(name, error.where or "files", error.message) from None
        if isinstance(error, OSError | MemoryError):
            raise _short(name, error) from None
        raise
    return fd


def _short(name: str, error: OSError | MemoryError) -> errors.RyzansteinError:
    """Returns the error for what the node lacks now: another node may be tried, and the files are as they were."""
    why = (error.strerror if isinstance(error, OSError) else None) or "out of memory"
    return errors.unavailable(errors.ADAPTER_NOT_SERVED, f"adapter {name!r} cannot be read now: {why}")
