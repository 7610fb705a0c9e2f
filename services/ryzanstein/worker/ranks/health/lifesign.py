"""Lets an agent see at once that a rank is being killed.

The end of a killed process is seen only after its memory has been released: some ten milliseconds
of work, done at the process's own low priority, a tenth of a second on a busy machine. Before that
the kernel marks the robust mutexes that its threads hold, each thread's own, and wakes their
waiters (get_robust_list(2), pthread_mutexattr_setrobust(3)). So one thread of a rank, at the
agent's priority, holds such a mutex in memory that both share, and does nothing else.
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
_HELD_AT = 128  # after the mutex, whose size differs between machines
_PROCESS_SHARED = 1  # pthread.h
_ROBUST = 1
_LOOK_S = 0.002
_libc = ctypes.CDLL(None)


class LifeSign:
    """A robust mutex in the shared memory of a descriptor, which stays the caller's.

    The agent creates the memory, the rank maps the descriptor that it was given.
    """

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _BYTES)
        self._mutex = ctypes.byref(ctypes.c_char.from_buffer(self._memory))
        self._over = threading.Event()

    def watch(self) -> bool:
        """Waits until the rank is being killed, and returns True. Called once, by the agent.

        Returns False if the rank ended its sign or was given up.
        """
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
        """Stops waiting for a rank that has not begun. Called by the agent."""
        self._over.set()

    @contextmanager
    def displayed(self, nice: int) -> Iterator[None]:
        """Holds the mutex while inside. Called by the rank.

        Lowers the priority of all its threads except the one that holds the mutex.
        """
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
    """Returns a descriptor of the memory, with the mutex in it. OSError: there is no memory."""
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
