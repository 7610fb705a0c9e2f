"""What runs beside the calls, once for all services: tasks that live as long as their service, and tasks that somebody started
and may not be waiting for any more.

No task ends unnoticed. An end that nobody asked for (an exception, a return of what should go on, a cancellation from within)
is logged with its exception, counted, and acted on: the task is run again, or the process stops, so that whatever keeps the
process (Kubernetes, `ryzanstein up`) starts it anew.
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
    """A background task ended without an error of its own: it returned, or what it waited for was cancelled."""


class Stop:
    """The policy of a task without which the process is of no use: its end is the process's, see `Background.until`."""


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
    """The background tasks of one process. `service` and the tasks' names, of which there are few, name the metrics."""

    def __init__(self, service: str, registry: CollectorRegistry) -> None:
        self._ends = Counter(
            f"ryzanstein_{service}_background_task_ends_total",
            "Ends of background tasks that nobody asked for.",
            ["task", "outcome"],
            registry=registry,
        )
        self._down = Gauge(
            f"ryzanstein_{service}_background_tasks_down",
            "Background tasks that ended and wait to be run again.",
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
        """Runs `run` until the task is cancelled; after an end that nobody asked for as `policy` says, which is by default
        again and again. `finite`: returning is no such end, and the task is over then. `on_end` hears of each before the pause.

        The task belongs to no request: its log lines carry no request's ids.
        """
        for outcome in ("failed", "returned"):  # so that `increase()` sees the first one
            self._ends.labels(name, outcome)
        self._down.labels(name)
        supervised = _Supervised(name, run, policy or Backoff(), finite, on_end)
        return self._start(name, self._keep(supervised), Context())

    def once(self, name: str, coroutine: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        """Runs it to its end, whether or not whoever started it waits for that. An exception that is no `RyzansteinError` is
        logged and counted."""
        task = self._start(name, coroutine)
        task.add_done_callback(partial(self._over, name))
        return task

    def watch_loop(self) -> None:
        """Logs and counts also what escapes callbacks, timers and other libraries' tasks in the running loop."""
        self._ends.labels(_LOOP, "failed")
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)

    async def until(self, asked: Awaitable[None]) -> None:
        """Returns or raises what `asked` does. Raises what a task of policy STOP ended with when that comes first."""
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
        """Cancels what still runs and returns when it has ended."""
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
        # What an error of ours means is in its message.
        stack = None if isinstance(error, RyzansteinError | TaskEndedError) else error
        log.error("background task ended", task=name, error=repr(error)[:512], exc_info=stack, **more)

    def _tell(self, task: _Supervised, error: Exception) -> None:
        try:
            task.on_end(error)
        except Exception:
            log.exception("end of a background task not acted on", task=task.name)

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
    """Runs it once. None: it has ended as it may. CancelledError when this task is to end."""
    try:
        await task.run()
    except asyncio.CancelledError as cancelled:
        current = asyncio.current_task()
        if current is None or current.cancelling():
            raise
        # Libraries cancel what is waited for when their own connection breaks (gRPC does).
        ended = TaskEndedError(f"what {task.name} waited for was cancelled")
        ended.__cause__ = cancelled
        return ended
    except Exception as error:
        return error
    return None if task.finite else TaskEndedError(f"{task.name} returned")
