"""What a killed server leaves in /dev/shm: segments that no process maps any more.

Servers that were killed cannot remove theirs, and a later one may fail for lack of memory there.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

SHM = Path("/dev/shm")


def present(folder: Path = SHM) -> frozenset[str]:
    """Returns the names of what is there."""
    with suppress(OSError):
        return frozenset(entry.name for entry in folder.iterdir())
    return frozenset()


def remove_new(before: frozenset[str], folder: Path = SHM) -> list[str]:
    """Removes our user's files that are not in `before` and that no living process has open or mapped; returns their names."""
    removed = []
    new = present(folder) - before
    in_use = _in_use(folder) if new else frozenset()
    for name in sorted(new - in_use):
        path = folder / name
        with suppress(OSError):
            if path.is_file() and path.lstat().st_uid == os.getuid():
                path.unlink()
                removed.append(name)
    return removed


def _in_use(folder: Path) -> frozenset[str]:
    """Returns the names in the folder that some process of this machine has open or mapped, as far as we may see."""
    prefix = f"{folder}/"
    names = set()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with suppress(OSError):
            for line in (process / "maps").read_text(errors="replace").splitlines():
                if (at := line.find(prefix)) >= 0:
                    names.add(line[at + len(prefix) :].removesuffix(" (deleted)"))
        with suppress(OSError):
            for link in (process / "fd").iterdir():
                with suppress(OSError):
                    target = os.readlink(link)
                    if target.startswith(prefix):
                        names.add(target.removeprefix(prefix).removesuffix(" (deleted)"))
    return frozenset(names)
