"""The folders of nodes beside one another in the directory of disk tiers: whose node lives, and which were left behind.

A node holds a lock on its folder while it lives. What no node has held for a long time is removed: a
node that was renamed or scaled away would otherwise keep its disk space for ever. Only files that
have the names of pages are removed, and nothing is followed that leads elsewhere.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISREG

import structlog

from ryzanstein.files.private_files import opener, private_folder
from ryzanstein.worker.agent.pages.page import ROOT_BYTES
from ryzanstein.worker.engine.memory.travel import NAME_BYTES

log = structlog.get_logger(__name__)

_OWNER = "owner"  # the file that is locked; its time says when a node used the folder last
_ROOT = re.compile(f"[0-9a-f]{{{2 * ROOT_BYTES}}}")
_PAGE = re.compile(f"[0-9a-f]{{{2 * NAME_BYTES}}}(\\.new)?")


def page_files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yields the pages in a node's folder, half-written ones too. Raises OSError."""
    for root in _roots(folder):
        for path in root.iterdir():
            stat = path.lstat()
            if _PAGE.fullmatch(path.name) and S_ISREG(stat.st_mode):
                yield path, stat


def remove_empty(folder: Path) -> None:
    """Removes the folders of roots that have no pages left. Raises OSError."""
    for root in list(_roots(folder)):
        with suppress(OSError):  # it has pages
            root.rmdir()


def claim(folder: Path) -> int:
    """Marks a folder as that of a living node, as long as the returned descriptor is open. Raises OSError."""
    private_folder(folder)
    owner = opener(str(folder / _OWNER), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    os.utime(owner)
    with suppress(OSError):  # another process of the same name lives: it keeps the folder, too
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return owner


def mark_used(owner: int) -> None:
    """Notes that the node of a claimed folder uses it now."""
    with suppress(OSError):  # the time only decides when a folder that was left behind is removed
        os.utime(owner)


def remove_abandoned(own: Path, keep_s: float) -> list[str]:
    """Removes folders beside `own` that no living node has and none has used for `keep_s`; returns their names."""
    removed, now_s = [], _now_of(own)
    for folder in sorted(own.parent.iterdir()):
        if folder == own or folder.is_symlink():
            continue
        with suppress(OSError), _abandoned(folder, now_s - keep_s) as abandoned:
            if abandoned:
                _remove(folder)
                removed.append(folder.name)
    return removed


@contextmanager
def _abandoned(folder: Path, before_s: float) -> Iterator[bool]:
    """Yields whether a folder was left behind, and keeps it from being claimed meanwhile. Raises OSError."""
    owner = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: its node lives
        used_s = max([os.fstat(owner).st_mtime, *(root.stat().st_mtime for root in _roots(folder))])
        yield used_s < before_s
    finally:
        os.close(owner)


def _now_of(folder: Path) -> float:
    """Returns the time by the clock of the file system, which may be that of a server."""
    owner = folder / _OWNER
    try:
        os.utime(owner)
        return owner.stat().st_mtime
    except OSError:
        return time.time()


def _remove(folder: Path) -> None:
    for path, _ in list(page_files(folder)):
        path.unlink(missing_ok=True)
    remove_empty(folder)
    (folder / _OWNER).unlink(missing_ok=True)
    with suppress(OSError):  # it has files that are not ours
        folder.rmdir()


def _roots(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if _ROOT.fullmatch(path.name) and not path.is_symlink() and path.is_dir())
