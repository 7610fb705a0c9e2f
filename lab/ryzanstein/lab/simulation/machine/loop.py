"""An asyncio event loop with virtual time: when nothing is left to do, it jumps to the next timer.

Callbacks run in the order of asyncio's own loop. Each belongs to the simulated process in whose
context it was scheduled. Callbacks of a frozen process are set aside, those of a dead one dropped.
There are no descriptors, threads or signals: requests for them are served by the simulated process,
or raise.
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio import events
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import Context, ContextVar
from typing import Any, Protocol

from ryzanstein.lab.simulation.machine.clock import RATE, VirtualClock

# This many callbacks without a change of time mean an endless loop.
LIVELOCK_CALLBACKS = 2_000_000
# Code takes time: after this many callbacks, time advances a little. Otherwise a wait for the rest
# of a rounding error would never end.
_CALLBACKS_PER_US = 1000
_COMPACT_FROM = 4096


class CallbackOwner(Protocol):
    """The owner of callbacks: a simulated process."""

    exception_handler: Any

    @property
    def runs(self) -> bool: ...

    def put_aside(self, handle: asyncio.Handle) -> None:
        """Sets the callback aside or drops it, because the process does not run now."""
        ...

    def submit(self, executor: Any, work: Callable[[], Any]) -> asyncio.Future[Any]:
        """Runs work as a thread would."""
        ...

    def on_signal(self, number: int, handle: asyncio.Handle | None) -> None: ...

    def add_task(self, task: asyncio.Task[Any]) -> None: ...


OWNER: ContextVar[CallbackOwner | None] = ContextVar("simulated_process", default=None)


class Delivery:
    """A callback at a time that nobody cancels: what a timer of asyncio costs is saved for each message of the network."""

    __slots__ = ("_args", "_callback", "_context", "_scheduled")
    _cancelled = False

    def __init__(self, callback: Callable[..., None], args: tuple[Any, ...], context: Context) -> None:
        self._callback, self._args, self._context = callback, args, context
        self._scheduled = True


class DeadlockError(Exception):
    """Something is awaited, and nothing can happen any more."""


class LivelockError(Exception):
    """Callbacks follow each other endlessly while time does not advance."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """The event loop of a simulation, see the module.

    Only one runs at a time; `clock` is its time.
    """

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock
        self._queue: deque[Any] = deque()
        self._timers: list[tuple[float, int, Any]] = []
        self._sequence = 0
        self._cancelled_timers = 0
        self._generators: dict[int, CallbackOwner | None] = {}
        self.callbacks = 0
        """How many have run."""

    def time(self) -> float:
        """Returns the time of the running code's own clock."""
        return self._clock.monotonic()

    @property
    def now(self) -> float:
        """The time of the simulation, whatever the clocks of processes say."""
        return self._clock.now

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        handle = asyncio.Handle(callback, args, self, context)
        self._queue.append(handle)
        return handle

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        return self.call_soon(callback, *args, context=context)

    def call_later(self, delay: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:  # type: ignore[override]
        return self._add_timer(self._clock.now + delay / RATE.get(), self.time() + delay, callback, args, context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:  # type: ignore[override]
        return self._add_timer(when / RATE.get(), when, callback, args, context)

    def call_after(self, delay_s: float, callback: Callable[..., Any], *args: Any, context: Context) -> asyncio.TimerHandle:
        """Calls back after so many seconds of the simulation."""
        when = self._clock.now + delay_s
        return self._add_timer(when, when, callback, args, context)

    def deliver(self, at: float, callback: Callable[..., None], args: tuple[Any, ...], context: Context) -> None:
        """Calls back at a time of the simulation."""
        self._sequence += 1
        heapq.heappush(self._timers, (at, self._sequence, Delivery(callback, args, context)))

    def _add_timer(self, at: float, when: float, callback: Any, args: Any, context: Context | None) -> asyncio.TimerHandle:
        """Adds a timer for a time of the simulation; `when` is the same for the clock of the caller."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._sequence += 1
        heapq.heappush(self._timers, (at, self._sequence, timer))
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def resume(self, handles: deque[asyncio.Handle]) -> None:
        """Runs callbacks that were set aside."""
        self._queue.extend(handles)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._cancelled_timers += 1
        if self._cancelled_timers > _COMPACT_FROM and 2 * self._cancelled_timers > len(self._timers):
            self._timers = [entry for entry in self._timers if not entry[2]._cancelled]
            heapq.heapify(self._timers)
            self._cancelled_timers = 0

    def _run_once(self) -> None:
        if not self._queue:
            self._advance()
        queue = self._queue
        for number in range(1, LIVELOCK_CALLBACKS):
            if not queue:
                return
            if not number % _CALLBACKS_PER_US:
                self._clock.now += 1e-6
            handle = queue.popleft()
            if handle._cancelled:
                continue
            context = handle._context
            owner = context.get(OWNER)
            if owner is not None and not owner.runs:
                owner.put_aside(handle)
                continue
            self.callbacks += 1
            try:  # as `Handle._run`, which is called millions of times
                context.run(handle._callback, *handle._args)
            except BaseException as error:
                self._report(handle, error)
            if self._stopping:  # type: ignore[attr-defined]
                return
        raise LivelockError(f"{LIVELOCK_CALLBACKS} callbacks at {self._clock.now:.6f} s")

    def _report(self, handle: asyncio.Handle, error: BaseException) -> None:
        """Reports the error of a callback, as asyncio does. Raises what must end the program."""
        if isinstance(error, SystemExit | KeyboardInterrupt):
            raise error
        what = {"message": f"Exception in callback {handle!r}", "exception": error, "handle": handle}
        self.call_exception_handler(what)

    def _advance(self) -> None:
        """Advances to the next timer and queues everything that is due then."""
        timers, pop = self._timers, heapq.heappop
        while timers and timers[0][2]._cancelled:
            pop(timers)
            self._cancelled_timers -= 1
        if not timers:
            raise DeadlockError(f"no event is left at {self._clock.now:.6f} s")
        now = self._clock.now = max(self._clock.now, timers[0][0])
        while timers and timers[0][0] <= now:
            timer = pop(timers)[2]
            timer._scheduled = False
            if timer._cancelled:
                self._cancelled_timers -= 1
            else:
                self._queue.append(timer)

    def create_task(self, coro: Any, *, name: object = None, context: Context | None = None) -> asyncio.Task[Any]:
        """Creates a task as asyncio does.

        A context without an owner, which services give to tasks that outlive a request, gets the
        creator's.
        """
        owner = OWNER.get()
        if context is not None and context.get(OWNER) is None and owner is not None:
            context.run(OWNER.set, owner)
            context.run(RATE.set, RATE.get())
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=None if name is None else str(name), context=context)
        if owner is not None:
            owner.add_task(task)
        return task

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        return self._owner("a thread").submit(executor, lambda: func(*args))

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:  # type: ignore[override]
        self._owner("a signal").on_signal(sig, asyncio.Handle(callback, args, self, None))

    def remove_signal_handler(self, sig: int) -> bool:
        owner = OWNER.get()
        if owner is not None:  # what a killed process leaves is closed outside of it
            owner.on_signal(sig, None)
        return owner is not None

    def set_exception_handler(self, handler: Any) -> None:
        """Sets the handler. A simulated process has its own."""
        owner = OWNER.get()
        if owner is None:
            super().set_exception_handler(handler)
        else:
            owner.exception_handler = handler

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        owner = OWNER.get()
        if owner is not None and owner.exception_handler is not None:
            owner.exception_handler(self, context)
        else:
            super().call_exception_handler(context)

    def _owner(self, what: str) -> CallbackOwner:
        owner = OWNER.get()
        if owner is None:
            raise RuntimeError(f"{what} outside of a simulated process")
        return owner

    def _write_to_self(self) -> None:
        """Does nothing: no selector sleeps."""

    def _process_events(self, event_list: Any) -> None:
        """Does nothing: there are no events."""

    def _asyncgen_firstiter_hook(self, agen: AsyncGenerator[Any, Any]) -> None:
        self._generators[id(agen)] = OWNER.get()

    def _asyncgen_finalizer_hook(self, agen: AsyncGenerator[Any, Any]) -> None:
        """Closes a dropped generator in the process that used it.

        It is not closed in the process that dropped the last reference.
        """
        owner = self._generators.pop(id(agen), None)
        if owner is None or owner.runs:
            context = Context()
            context.run(OWNER.set, owner)
            self.call_soon(self._close_generator, agen, context=context)

    def _close_generator(self, agen: AsyncGenerator[Any, Any]) -> None:
        self.create_task(_closed(agen))


async def _closed(agen: AsyncGenerator[Any, Any]) -> None:
    await agen.aclose()


def run(loop: SimulatedLoop, main: Coroutine[Any, Any, Any]) -> Any:
    """Runs `main` to its end on the loop."""
    asyncio.set_event_loop(loop)
    events._set_running_loop(None)
    try:
        return loop.run_until_complete(main)
    finally:
        asyncio.set_event_loop(None)
