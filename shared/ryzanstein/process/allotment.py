"""What this process may use of its machine: processor cores, memory and open files.

The machine's own figures say too much in a container: a control group may grant less (cgroups(7);
`cpu.cfs_quota_us` and `memory.limit_in_bytes` of version 1, `cpu.max` and `memory.max` of version 2).
The limits of every group above count too, as far as they can be seen from here. Standard library
only, because every process may ask.

`root` is the directory that stands for `/`; the affinity of the process is always the real one.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_ROOT = Path("/")
_OWN_FILES = 512  # links, gRPC channels, stores, logs
_MAX_GROUPS = 10_000  # that are searched for this process, where the kernel does not tell its group's name
_OCTAL = re.compile(r"\\([0-7]{3})")


def usable_cores(root: Path = _ROOT) -> float:
    """Returns the cores that may compute at once: those that it may run on, or less by a quota, such as 0.5."""
    return min(float(len(os.sched_getaffinity(0))), granted_cores(root))


def whole_cores(root: Path = _ROOT) -> int:
    """Returns `usable_cores` as a number of threads: rounded down, at least 1."""
    return max(1, int(usable_cores(root)))


def granted_cores(root: Path = _ROOT) -> float:
    """Returns the processor time per time that the control groups grant; infinity without a quota."""
    return min((quota for group in _groups("cpu", root) for quota in group.cores()), default=float("inf"))


def memory_bytes(root: Path = _ROOT) -> int:
    """Returns the memory of the machine, or the smallest limit of the control groups if that is less."""
    limits = (limit for group in _groups("memory", root) for limit in group.memory_limit())
    return min([_meminfo("MemTotal", root), *limits])


def available_memory_bytes(root: Path = _ROOT) -> int:
    """Returns the memory that can be taken now without swapping, in the machine and in every control group."""
    rooms = (room for group in _groups("memory", root) for room in group.memory_room())
    return max(0, min([_meminfo("MemAvailable", root), *rooms]))


@dataclass(frozen=True, slots=True)
class _Group:
    """The directory of a control group, of either version of the interface. Missing files limit nothing."""

    path: Path
    is_unified: bool

    def cores(self) -> Iterator[float]:
        if self.is_unified:
            words = _words(self.path / "cpu.max")
        else:
            words = [*_words(self.path / "cpu.cfs_quota_us"), *_words(self.path / "cpu.cfs_period_us")]
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):  # else "max", or -1
            yield int(words[0]) / int(words[1])

    def memory_limit(self) -> Iterator[int]:
        words = _words(self.path / ("memory.max" if self.is_unified else "memory.limit_in_bytes"))
        if words and words[0].isdecimal():
            yield int(words[0])

    def memory_room(self) -> Iterator[int]:
        """Yields what is left of the limit. Cached files count as used in a group, but give way: they are added back."""
        used = _words(self.path / ("memory.current" if self.is_unified else "memory.usage_in_bytes"))
        for limit in self.memory_limit() if used else ():
            yield limit - int(used[0]) + self._cached_bytes()

    def _cached_bytes(self) -> int:
        words = _words(self.path / "memory.stat")
        stat = dict(zip(words[::2], words[1::2], strict=False))
        prefix = "" if self.is_unified else "total_"  # with the groups below, as version 2 always counts
        return sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))


@dataclass(frozen=True, slots=True)
class _Mount:
    """A hierarchy of control groups: the group `top` of it is seen at `point`."""

    top: PurePosixPath
    point: Path
    controllers: frozenset[str]  # none: version 2


def _groups(controller: str, root: Path) -> Iterator[_Group]:
    """Yields the groups of this process that may limit what `controller` controls: its own and all above."""
    mounts = list(_mounts(root))
    for names, path in _memberships(root):
        for mount in mounts:
            if mount.controllers == names and (not names or controller in names):
                for place in _upward(mount, path):
                    yield _Group(place, is_unified=not names)


def _memberships(root: Path) -> Iterator[tuple[frozenset[str], PurePosixPath]]:
    """Yields the controllers and the path of this process's group in each hierarchy (proc_pid_cgroup(5))."""
    for line in filter(None, _lines(root / "proc/self/cgroup")):
        _, names, path = line.split(":", 2)
        yield frozenset(names.split(",")) - {""}, PurePosixPath(path)


def _mounts(root: Path) -> Iterator[_Mount]:
    """Yields where hierarchies are mounted (proc_pid_mountinfo(5))."""
    named = {name for names, _ in _memberships(root) for name in names}
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, rest = line.partition(" - ")
        kind, _, options = [*rest.split(" ", 2), "", ""][:3]
        if kind in ("cgroup", "cgroup2"):
            top, point = (_OCTAL.sub(lambda code: chr(int(code[1], 8)), field) for field in fields.split(" ")[3:5])
            controllers = frozenset(options.split(",")) & named if kind == "cgroup" else frozenset[str]()
            yield _Mount(PurePosixPath(top), root / point.lstrip("/"), controllers)


def _upward(mount: _Mount, path: PurePosixPath) -> Iterator[Path]:
    """Yields the directories of a group and of those above it, up to the mount's.

    A container may see less than its path says: then the mount shows the nearest group there is.
    """
    if ".." in mount.top.parts:  # mounted outside this namespace, in which no name leads from there to here
        place = _searched(mount.point)
    elif ".." in path.parts:  # a group outside this namespace
        place = mount.point
    else:
        place = mount.point / (path.relative_to(mount.top) if path.is_relative_to(mount.top) else path.relative_to("/"))
    for directory in (place, *place.parents):
        if directory.is_relative_to(mount.point) and directory.is_dir():
            yield directory


def _searched(top: Path) -> Path:
    """Returns the group below `top` that has this process in it, or `top` if none is found."""
    own = str(os.getpid())
    for number, (directory, _, _) in enumerate(os.walk(top)):
        if own in _words(Path(directory) / "cgroup.procs"):
            return Path(directory)
        if number >= _MAX_GROUPS:
            break
    return top


def _meminfo(field: str, root: Path) -> int:
    """Returns a field of proc_meminfo(5), in bytes."""
    return next(int(line.split()[1]) * 1024 for line in _lines(root / "proc/meminfo") if line.startswith(f"{field}:"))


def _words(file: Path) -> list[str]:
    return " ".join(_lines(file)).split()


def _lines(file: Path) -> Iterable[str]:
    try:
        return file.read_text(errors="surrogateescape").splitlines()
    except OSError:  # no such controller, interface or kernel
        return ()


def may_open(num_files: int) -> bool:
    """Raises this process's limit of open files to so many, beside those that any service has.

    Returns False when the hard limit is too low.
    """
    wanted = num_files + _OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return True
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft >= wanted
