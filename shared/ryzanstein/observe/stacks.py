"""Where this process's own threads and tasks are, as text: one frame a line, the innermost first."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from types import FrameType

MAX_FRAMES = 64
MAX_TASKS = 1000
_KINDS = ("cr", "ag", "gi")
"""Of a coroutine, an asynchronous generator, and a generator, as the names of their attributes begin."""
_STEPS = frozenset({"async_generator_asend", "async_generator_athrow", "coroutine_wrapper"})


@dataclass(frozen=True, slots=True)
class NamedStack:
    """A thread by its kernel's id, or a task (`tid` 0)."""

    name: str
    stack: str
    tid: int = 0


def thread_stacks() -> list[NamedStack]:
    """Returns the stack of each thread that runs Python."""
    frames = sys._current_frames()
    return [
        NamedStack(thread.name, _text(traceback.walk_stack(frames[thread.ident])), thread.native_id or 0)
        for thread in threading.enumerate()
        if thread.ident in frames
    ]


def task_stacks() -> list[NamedStack]:
    """Returns the stack of each task of the running loop, along the coroutines that it awaits. At most MAX_TASKS."""
    return [NamedStack(task.get_name(), _awaits(task)) for task in islice(asyncio.all_tasks(), MAX_TASKS)]


def _awaits(task: asyncio.Task[object]) -> str:
    """Returns the frames of a task. Its own `get_stack` has the outermost coroutine alone when the task waits."""
    frames: list[tuple[FrameType, int]] = []
    waiting: object = task.get_coro()
    for _ in range(MAX_FRAMES):
        kind = next((kind for kind in _KINDS if hasattr(waiting, f"{kind}_frame")), None)
        if kind is None:
            break
        frame: FrameType | None = getattr(waiting, f"{kind}_frame")
        if frame is not None:  # of a coroutine of Cython there is none
            frames.append((frame, frame.f_lineno))
        waiting = _generator_of(getattr(waiting, "gi_yieldfrom" if kind == "gi" else f"{kind}_await", None))
    return _text(reversed(frames))


def _generator_of(waiting: object) -> object:
    """Returns what is awaited. A step of an asynchronous generator does not name its generator, but refers to it."""
    if type(waiting).__name__ not in _STEPS:
        return waiting
    return next((each for each in gc.get_referents(waiting) if any(hasattr(each, f"{kind}_frame") for kind in _KINDS)), None)


def _text(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Returns frames as faulthandler writes them."""
    return "\n".join(
        f'File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}'
        for frame, line in islice(frames, MAX_FRAMES)
    )
