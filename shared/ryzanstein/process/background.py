"""Background tasks, for all services: tasks of the service's lifetime, and tasks without a waiter.

No task ends unnoticed. An unexpected end (an exception, a return of a task that should go on, a
cancellation from within) is logged with its exception, counted and acted on: the task runs again,
or the process stops, so that its supervisor (Kubernetes, `ryzanstein up`) restarts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from ryzanstein.backoff import Backoff, Streak
from ryzanstein.errors import RyzansteinError

log = structlog.get_logger(__name__)

_LOOP = "event_loop"
_Result = TypeVar("_Result")


class TaskEndedError(Exception):
    """A background task ended without an error: it returned, or what it awaited was cancelled."""


class Stop:
    """The policy of an essential task: its end stops the process, see `Background.until`."""


STOP = Stop()
Policy = Backoff | Stop


@dataclass(frozen=True, slots=True)
class _Supervised:
    name: str
    run: Callable[[], Coroutine[Any, Any, None]]
    policy: Policy
    finite: bool
    on_end: Callable[[Exception], None]


class Background:
    """The background tasks of one process.

    `service` is in the metrics' names, and the tasks' names are a label: there must be few.
    """

    def __init__(self, service: str, registry: CollectorRegistry) -> None:
        self._ends = Counter(
            f"ryzanstein_{service}_background_task_ends_total",
            "Unexpected ends of background tasks.",
            ["task", "outcome"],
            registry=registry,
        )
        self._down = Gauge(
            f"ryzanstein_{service}_background_tasks_down",
            "Background tasks that ended and wait to be restarted.",
            ["task"],
            registry=registry,
        )
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopped = asyncio.Event()
        self._failure: Exception | None = None

    def supervise(
        self,
        name: str,
        run: Callable[[], Coroutine[Any, Any, None]],
        policy: Policy | None = None,
        *,
        finite: bool = False,
        on_end: Callable[[Exception], None] = lambda _: None,
    ) -> asyncio.Task[None]:
        """Runs `run` until the returned task is cancelled.

        After an unexpected end `policy` applies; by default the task always runs again. `finite`: a
        return is expected and ends the task. `on_end` is called for each unexpected end, before the
        pause. The task belongs to no request: its log lines have no request ids.
        """
        for outcome in ("failed", "returned"):  # so that `increase()` sees the first one
            self._ends.labels(name, outcome)
        self._down.labels(name)
        supervised = _Supervised(name, run, policy or Backoff(), finite, on_end)
        return self._start(name, self._keep(supervised), Context())

    def once(self, name: str, coroutine: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        """Runs a coroutine to its end, whether or not its starter waits for it.

        An exception that is not a `RyzansteinError` is logged and counted.
        """
        task = self._start(name, coroutine)
        task.add_done_callback(partial(self._over, name))
        return task

    def watch_loop(self) -> None:
        """Logs and counts errors of callbacks, timers and libraries' tasks in the running loop."""
        self._ends.labels(_LOOP, "failed")
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)

    async def until(self, asked: Awaitable[None]) -> None:
        """Returns or raises what `asked` does.

        If a task of policy STOP ends first, raises its error. Cancellation cancels `asked`.
        """
        asking, stopped = asyncio.ensure_future(asked), asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait((asking, stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            asking.cancel()
            stopped.cancel()
        if self._failure is not None:
            raise self._failure
        await asking

    async def close(self) -> None:
        """Cancels all running tasks and returns when they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(
        self, name: str, coroutine: Coroutine[Any, Any, _Result], context: Context | None = None
    ) -> asyncio.Task[_Result]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name, context=context)
        self._tasks.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(self._tasks.discard)
        return task

    async def _keep(self, task: _Supervised) -> None:
        clock = asyncio.get_running_loop().time
        streak = Streak(task.policy) if isinstance(task.policy, Backoff) else None
        while True:
            began = clock()
            error = await _end_of(task)
            if error is None:
                return
            pause_s = None if streak is None else streak.ended(clock() - began)
            self._note(task.name, error, again_s=pause_s)
            self._tell(task, error)
            if pause_s is None:
                self._stop(error)
                return
            with self._down.labels(task.name).track_inprogress():
                await asyncio.sleep(pause_s)

    def _note(self, name: str, error: Exception, **more: object) -> None:
        self._ends.labels(name, "returned" if isinstance(error, TaskEndedError) else "failed").inc()
        # The message of our own errors is enough.
        stack = None if isinstance(error, RyzansteinError | TaskEndedError) else error
        log.error("background task ended", task=name, error=repr(error)[:512], exc_info=stack, **more)

    def _tell(self, task: _Supervised, error: Exception) -> None:
        try:
            task.on_end(error)
        except Exception:
            log.exception("background task's end handler failed", task=task.name)

    def _stop(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._stopped.set()

    def _over(self, name: str, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, Exception) and not isinstance(error, RyzansteinError):
            self._note(name, error)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._ends.labels(_LOOP, "failed").inc()
        log.error("error in the event loop", message=context.get("message"), exc_info=context.get("exception"))


async def _end_of(task: _Supervised) -> Exception | None:
    """Runs the task once and returns its unexpected end, or None for an expected one.

    Raises CancelledError if this task itself is cancelled.
    """
    try:
        await task.run()
    except asyncio.CancelledError as cancelled:
        current = asyncio.current_task()
        if current is None or current.cancelling():
            raise
        # Some libraries, such as gRPC, cancel what a task awaits when their own connection breaks.
        ended = TaskEndedError(f"{task.name} ended: what it awaited was cancelled")
        ended.__cause__ = cancelled
        return ended
    except Exception as error:
        return error
    return None if task.finite else TaskEndedError(f"{task.name} returned")
