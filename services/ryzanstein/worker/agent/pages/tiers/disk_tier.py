"""Pages on disk: they outlive the node's processes, and cost a conversation that returns only a read.

Each page is a file that appears whole or not at all, with its checksum. Nothing is synced: a page
that a crash of the machine damages is computed again.
"""

from __future__ import annotations

import asyncio
import errno
import os
import struct
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG

import structlog

from ryzanstein.files.private_files import opener, private_folder
from ryzanstein.worker.agent.pages.page import Page
from ryzanstein.worker.agent.pages.store import PageScope, StoreFailed
from ryzanstein.worker.agent.pages.tiers.disk_folders import claim, mark_used, page_files, remove_abandoned, remove_empty

log = structlog.get_logger(__name__)

_HEAD = struct.Struct("<8sI")
_MAGIC = b"RYZPAGE1"
_READ_AT_ONCE = 8
_REST_S = 30.0
_MARK_S = 60.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
_SHRUNK = 0.9  # of its size is left of a tier whose disk is full


class DiskTier:
    """A `PageStore` in a folder, of at most `max_bytes`; the least recently used page goes first.

    `on_size` is called with the bytes in use, `on_corrupt` for each page that was damaged. The folders
    of other nodes beside this one are removed when none has used them for `keep_s`; 0: never.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        on_size: Callable[[int], None],
        on_corrupt: Callable[[], None],
        keep_s: float = 0.0,
    ) -> None:
        self._folder, self._max_bytes, self._keep_s = folder, max_bytes, keep_s
        self._owner, self._marked_s = -1, time.monotonic()
        self._on_size, self._on_corrupt = on_size, on_corrupt
        self._sizes: OrderedDict[Path, int] = OrderedDict()
        self._num_bytes = 0
        self._opened, self._writing = asyncio.Lock(), asyncio.Lock()
        self._is_open = False

    async def missing(self, scope: PageScope, keys: Sequence[bytes]) -> Sequence[int]:
        """See `PageStore.missing`. The beginning of the chain is kept longest."""
        await self._open()
        self._mark_used()
        paths = [self._place(scope, key)[0] for key in keys]
        missing = [place for place, path in enumerate(paths) if path not in self._sizes]
        for path in reversed(paths):
            if path in self._sizes:
                self._sizes.move_to_end(path)
        return missing

    async def send(self, scope: PageScope, parent: bytes, batches: AsyncIterator[Sequence[Page]]) -> int:
        """See `PageStore.send`. Raises StoreFailed when the disk is full; a tenth of the pages makes way then."""
        await self._open()
        self._mark_used()
        stored = 0
        try:
            async for pages in batches:
                for page in pages:
                    async with self._writing:  # the models of a node may have the same pages
                        await self._write(self._path(scope.root, page.key), page, scope.root)
                    stored += 1
        except OSError as error:
            removed = await self._shrink() if error.errno in _FULL else 0
            log.warning("pages cannot be written", folder=str(self._folder), error=str(error), removed=removed)
            raise StoreFailed("failed", _REST_S) from None
        finally:
            self._on_size(self._num_bytes)
        return stored

    async def _shrink(self) -> int:
        """Removes the oldest pages, because others need the disk; returns how many."""
        async with self._writing:
            before = dict(self._sizes)
            oldest = self._take_oldest(self._max_bytes - int(self._num_bytes * _SHRUNK))
            try:
                await asyncio.to_thread(_remove, oldest)
            except OSError as error:  # a file system that has become read-only, say
                log.warning("pages cannot be removed", folder=str(self._folder), error=str(error))
                left = [path for path in oldest if await asyncio.to_thread(path.exists)]
                for path in reversed(left):
                    self._sizes[path] = before[path]
                    self._sizes.move_to_end(path, last=False)
                    self._num_bytes += before[path]
                return len(oldest) - len(left)
            return len(oldest)

    async def _write(self, path: Path, page: Page, root: bytes) -> None:
        size = _HEAD.size + len(page.content)
        self._forget(path)
        await asyncio.to_thread(_write, path, page, root, self._take_oldest(size))
        self._sizes[path] = size
        self._num_bytes += size

    async def fetch(self, scope: PageScope, keys: Sequence[bytes]) -> AsyncIterator[Page]:
        """See `PageStore.fetch`."""
        await self._open()
        self._mark_used()
        for start in range(0, len(keys), _READ_AT_ONCE):
            places = [(key, *self._place(scope, key)) for key in keys[start : start + _READ_AT_ONCE]]
            some = [place for place in places if place[1] in self._sizes]
            pages = await asyncio.to_thread(_read_all, some)
            self._lost([path for (_, path, _), page in zip(some, pages, strict=True) if page is None])
            for key, page in zip(keys[start : start + _READ_AT_ONCE], pages, strict=False):
                if page is None or page.key != key:
                    return
                yield page
            if len(some) < len(keys[start : start + _READ_AT_ONCE]):
                return

    async def close(self) -> None:
        """Does nothing: the tier is shared by the models of the node."""

    def _lost(self, paths: Sequence[Path]) -> None:
        """Forgets pages that are damaged or no longer there."""
        if paths:
            log.warning("pages on disk are damaged", folder=str(self._folder), pages=len(paths))
        for path in paths:
            self._on_corrupt()
            self._forget(path)
        self._on_size(self._num_bytes)

    def _mark_used(self) -> None:
        """Sets the time by which other nodes judge whether the folder was left behind, at most once a minute."""
        now = time.monotonic()
        if now - self._marked_s >= _MARK_S:
            self._marked_s = now
            mark_used(self._owner)

    async def _open(self) -> None:
        """Finds what is there already, the first time. Raises StoreFailed."""
        async with self._opened:
            if self._is_open:
                return
            try:
                await asyncio.to_thread(self._find)
            except OSError as error:
                log.warning("pages cannot be kept on disk", folder=str(self._folder), error=str(error))
                raise StoreFailed("failed", _REST_S) from None
            self._on_size(self._num_bytes)
            self._is_open = True

    def _find(self) -> None:
        """Takes over the pages in the folder. They may be millions: it runs in a thread, and nothing else meanwhile."""
        if self._owner < 0:
            self._owner = claim(self._folder)
        if self._keep_s and (removed := remove_abandoned(self._folder, self._keep_s)):
            log.info("folders of pages removed that no node has used", folders=removed, keep_s=self._keep_s)
        self._sizes = OrderedDict(_find(self._folder))
        self._num_bytes = sum(self._sizes.values())
        _remove(self._take_oldest(0))

    def _take_oldest(self, num_bytes: int) -> list[Path]:
        """Forgets the oldest pages until so many bytes fit; returns what is to be removed."""
        oldest: list[Path] = []
        while self._sizes and self._num_bytes + num_bytes > self._max_bytes:
            oldest.append(next(iter(self._sizes)))
            self._forget(oldest[-1])
        return oldest

    def _forget(self, path: Path) -> None:
        self._num_bytes -= self._sizes.pop(path, 0)

    def _path(self, root: bytes, key: bytes) -> Path:
        return self._folder / root.hex() / key.hex()

    def _place(self, scope: PageScope, key: bytes) -> tuple[Path, bytes]:
        """Returns where a page is or would be, and the root of its checksum: it may be of the version before."""
        path = self._path(scope.root, key)
        if scope.earlier and path not in self._sizes and (earlier := self._path(scope.earlier, key)) in self._sizes:
            return earlier, scope.earlier
        return path, scope.root


def _find(folder: Path) -> list[tuple[Path, int]]:
    """Returns the pages in the folder with their sizes, the oldest first; removes half-written ones."""
    private_folder(folder)
    found: list[tuple[float, Path, int]] = []
    for path, stat in page_files(folder):
        if path.suffix:
            path.unlink(missing_ok=True)
        else:
            found.append((stat.st_mtime, path, stat.st_size))
    remove_empty(folder)
    return [(path, size) for _, path, size in sorted(found)]


def _remove(paths: Sequence[Path]) -> None:
    """Removes pages, and the folders of roots that have none left."""
    for path in paths:
        path.unlink(missing_ok=True)
    for folder in {path.parent for path in paths}:
        with suppress(OSError):
            folder.rmdir()


def _write(path: Path, page: Page, root: bytes, oldest: Sequence[Path]) -> None:
    _remove(oldest)
    private_folder(path.parent)
    new = path.with_suffix(".new")
    try:
        with open(new, "wb", opener=opener) as file:
            file.write(_HEAD.pack(_MAGIC, page.checksum(root)))
            file.write(page.content)
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _read_all(places: Sequence[tuple[bytes, Path, bytes]]) -> list[Page | None]:
    return [_read(path, key, root) for key, path, root in places]


def _no_link(path: str, flags: int) -> int:
    """Opens a file; neither follows a link nor waits for the other end of a pipe. For `open`."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def _read(path: Path, key: bytes, root: bytes) -> Page | None:
    """Returns the page; None when it is damaged or not there."""
    try:
        with open(path, "rb", opener=_no_link) as file:
            data = file.read() if S_ISREG(os.fstat(file.fileno()).st_mode) else b""
    except OSError:
        return None
    if len(data) < _HEAD.size:
        return None
    magic, checksum = _HEAD.unpack_from(data)
    page = Page(key, data[_HEAD.size :])
    return page if magic == _MAGIC and page.checksum(root) == checksum else None
