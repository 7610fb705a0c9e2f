"""How an agent sees at once that a rank is being killed.

The end of a killed process is seen when its memory has been taken down: some ten milliseconds of work, which it does at its own
low priority, a tenth of a second on a busy machine. Before that the kernel marks the robust mutexes that its threads hold,
each thread's own, and wakes who waits for them (get_robust_list(2), pthread_mutexattr_setrobust(3)). So one thread of a rank,
at the agent's priority, holds one in memory that both share, and does nothing else.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_BYTES = mmap.PAGESIZE
_HELD_AT = 128  # behind the mutex, whose size differs between machines
_PROCESS_SHARED = 1  # pthread.h
_ROBUST = 1
_LOOK_S = 0.002
_libc = ctypes.CDLL(None)


class LifeSign:
    """The shared memory of a descriptor, which stays the caller's. The agent makes it, the rank maps what it was given."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _BYTES)
        self._mutex = ctypes.byref(ctypes.c_char.from_buffer(self._memory))
        self._over = threading.Event()

    def watch(self) -> bool:
        """The agent's, once: waits until the rank is being killed, True, or has ended its sign or been given up, False."""
        try:
            while not self._memory[_HELD_AT]:
                if self._over.wait(_LOOK_S):
                    return False
            result = _libc.pthread_mutex_lock(self._mutex)
            _libc.pthread_mutex_unlock(self._mutex)
            return bool(result == errno.EOWNERDEAD)
        finally:
            del self._mutex
            self._memory.close()

    def give_up(self) -> None:
        """The agent's: nothing is to be learnt any more from a rank that has not begun."""
        self._over.set()

    @contextmanager
    def shown(self, nice: int) -> Iterator[None]:
        """The rank's: held while inside. Lowers the priority of all its threads but the one that holds it."""
        held, leave = threading.Event(), threading.Event()
        thread = threading.Thread(target=self._hold, args=(held, leave), name="lifesign", daemon=True)
        thread.start()
        held.wait()
        os.nice(nice)
        try:
            yield
        finally:
            leave.set()
            thread.join()

    def _hold(self, held: threading.Event, leave: threading.Event) -> None:
        _libc.pthread_mutex_lock(self._mutex)
        self._memory[_HELD_AT] = 1
        held.set()
        leave.wait()
        _libc.pthread_mutex_unlock(self._mutex)


def make() -> int:
    """A descriptor of the memory, with the mutex in it. OSError: there is no memory."""
    fd = os.memfd_create("lifesign")
    try:
        os.ftruncate(fd, _BYTES)
        with mmap.mmap(fd, _BYTES) as memory:
            attributes = ctypes.create_string_buffer(64)
            _libc.pthread_mutexattr_init(attributes)
            _libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED)
            _libc.pthread_mutexattr_setrobust(attributes, _ROBUST)
            mutex = ctypes.c_char.from_buffer(memory)
            _libc.pthread_mutex_init(ctypes.byref(mutex), attributes)
            del mutex  # or the memory could not be closed
    except BaseException:
        os.close(fd)
        raise
    return fd
