"""A simulated process: tasks on one machine that freeze, die and stall together."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ryzanstein.lab.simulation.machine.clock import RATE
from ryzanstein.lab.simulation.machine.loop import OWNER, SimulatedLoop

DISK_S = 0.0005
"""How long an access to a healthy disk takes."""


class State(Enum):
    """The state of a process."""

    RUNS = "runs"
    FROZEN = "frozen"
    ENDED = "ended"


@dataclass(eq=False, slots=True)
class SimulatedMachine:
    """A host: a wall clock, and a disk that can be slow, full or broken."""

    name: str
    wall_offset_s: float = 0.0
    clock_rate: float = 1.0
    """Of its monotonic clock; see `clock.RATE`."""
    disk_delay_s: float = DISK_S
    disk_error: Callable[[], Exception] | None = None
    """Makes the exception that each access raises; None if the disk works."""


@dataclass(eq=False, slots=True)
class _Thread:
    """An executor of a process. It does one thing after another.

    It skips work whose caller went away before the work began.
    """

    of_disk: bool
    busy: bool = False
    waiting: deque[tuple[asyncio.Future[Any], Callable[[], Any]]] = field(default_factory=deque)


class Process:
    """A simulated process. `start` it once.

    It ends when its main coroutine does, or by `kill`. `ended` resolves to the exception that ended
    it, or None.
    """

    def __init__(self, name: str, machine: SimulatedMachine, loop: SimulatedLoop, rng: random.Random) -> None:
        self.name = name
        self.machine = machine
        self.state = State.RUNS
        self.runs = True
        """Whether it is neither frozen nor ended: read before each of its callbacks."""
        self.ended: asyncio.Future[BaseException | None] = loop.create_future()
        self.on_end: list[Callable[[], None]] = []
        """Called when it ended, in order: the network, its ranks."""
        self.crashes: list[tuple[asyncio.Task[Any], BaseException]] = []
        """Tasks that ended with an exception that nobody retrieved."""
        self.exception_handler: Any = None
        self.rewrite: Callable[[Any], Any] | None = None
        """Rewrites the messages that it sends, as a process of another version would send them."""
        self._loop = loop
        self._rng = rng
        self.context = Context()
        self.context.run(OWNER.set, self)
        self.context.run(RATE.set, machine.clock_rate)
        self._aside: deque[asyncio.Handle] = deque()
        self._signals: dict[int, asyncio.Handle] = {}
        self._threads: dict[int, _Thread] = {}
        self._tasks: dict[asyncio.Task[Any], None] = {}

    @property
    def alive(self) -> bool:
        return self.state is not State.ENDED

    def start(self, main: Coroutine[Any, Any, None]) -> None:
        task = self.context.run(self._loop.create_task, main)
        task.add_done_callback(self._on_main)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls the function as this process."""
        return self.context.copy().run(function, *args)

    def call_later(self, delay_s: float, callback: Callable[..., Any], *args: Any) -> asyncio.TimerHandle:
        """Schedules a callback in the process's own context.

        It does not run while the process is frozen, and never after its end.
        """
        return self._loop.call_after(delay_s, callback, *args, context=self.context)

    def freeze(self) -> None:
        """Acts as SIGSTOP: nothing of it runs until `thaw`."""
        if self.state is State.RUNS:
            self.state, self.runs = State.FROZEN, False

    def thaw(self) -> None:
        if self.state is State.FROZEN:
            self.state, self.runs = State.RUNS, True
            aside, self._aside = self._aside, deque()
            self._loop.resume(aside)

    def kill(self) -> None:
        """Acts as SIGKILL: nothing of it runs any more, not even `finally` blocks."""
        self._end(None)

    def signal(self, number: int) -> None:
        """Delivers SIGTERM or SIGINT to its handler. Without a handler the process ends."""
        if (handle := self._signals.get(number)) is not None:
            self._loop.resume(deque([handle]))
        elif self.alive:
            self.kill()

    def put_aside(self, handle: asyncio.Handle) -> None:
        """See `loop.CallbackOwner`."""
        if self.state is State.FROZEN:
            self._aside.append(handle)

    def on_signal(self, number: int, handle: asyncio.Handle | None) -> None:
        """See `loop.CallbackOwner`."""
        if handle is None:
            self._signals.pop(number, None)
        else:
            self._signals[number] = handle

    def submit(self, executor: Any, work: Callable[[], Any]) -> asyncio.Future[Any]:
        """See `loop.CallbackOwner`."""
        future: asyncio.Future[Any] = self._loop.create_future()
        # Threads of a store do nothing but disk accesses; work in the default ones may need no disk
        # at all.
        thread = self._threads.setdefault(id(executor), _Thread(of_disk=executor is not None))
        thread.waiting.append((future, work))
        if not thread.busy:
            self._begin(thread)
        return future

    def _begin(self, thread: _Thread) -> None:
        """Begins the next piece of work, which takes as long as the disk needs now."""
        thread.busy = False
        while thread.waiting and not thread.busy:
            future, work = thread.waiting.popleft()
            if not future.cancelled():
                thread.busy = True
                delay_s = self.machine.disk_delay_s * self._rng.uniform(0.5, 1.5)
                error = self.machine.disk_error if thread.of_disk else None
                self.call_later(delay_s, self._perform, thread, future, work, error)

    def _perform(
        self,
        thread: _Thread,
        future: asyncio.Future[Any],
        work: Callable[[], Any],
        disk_error: Callable[[], Exception] | None,
    ) -> None:
        """Finishes work that has begun, even if its caller went away."""
        self._begin(thread)
        result, error = None, None
        try:
            if disk_error is not None:
                raise disk_error()
            result = work()
        except Exception as raised:
            error = raised
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def add_task(self, task: asyncio.Task[Any]) -> None:
        """See `loop.CallbackOwner`."""
        if not self.alive:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            return
        self._tasks[task] = None
        task.add_done_callback(self._on_task, context=self.context)

    def _on_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and task._log_traceback:
            # A waiter is notified in this round of the loop and retrieves the exception in the
            # next.
            self._loop.call_after(0.001, self._look_at, task, context=self.context)

    def _look_at(self, task: asyncio.Task[Any]) -> None:
        if task._log_traceback and (error := task._exception) is not None:
            self.crashes.append((task, error))

    def _on_main(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self.state is State.ENDED:
            return
        self.state, self.runs = State.ENDED, False
        self._aside.clear()
        self._signals.clear()
        if not self.ended.done():
            self.ended.set_result(error)
        for notify in self.on_end:
            notify()
        self.context.run(self._bury)

    def _bury(self) -> None:
        """Closes its coroutines now, in order.

        What they do at their end has no effect: the process has ended.
        """
        tasks, self._tasks = list(self._tasks), {}
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            # For one that awaits while it is closed, or that runs just now.
            with contextlib.suppress(Exception):
                task.get_coro().close()
