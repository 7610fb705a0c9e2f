"""Tasks beside the calls: whatever ends one, it is noticed, counted and acted on; what is asked to end ends."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.contextvars import bound_contextvars, get_contextvars
from structlog.testing import capture_logs

from ryzanstein import errors
from ryzanstein.backoff import Backoff, Streak
from ryzanstein.process.background import STOP, Background, TaskEndedError

SOON = Backoff(0.001, 0.002, 60.0)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
async def background(registry: CollectorRegistry) -> AsyncIterator[Background]:
    background = Background("test", registry)
    yield background
    await background.close()


@pytest.fixture
def ends(registry: CollectorRegistry) -> Callable[..., float]:
    def value(task: str, outcome: str = "failed") -> float:
        labels = {"task": task, "outcome": outcome}
        return registry.get_sample_value("ryzanstein_test_background_task_ends_total", labels) or 0.0

    return value


class Script:
    """Ends as told, one run after the other; runs for ever when nothing is left to tell."""

    def __init__(self, *ends: Any) -> None:
        self.ends = list(ends)
        self.runs = 0
        self.goes_on = asyncio.Event()

    async def run(self) -> None:
        self.runs += 1
        if not self.ends:
            self.goes_on.set()
            await asyncio.Event().wait()
        end = self.ends.pop(0)
        await asyncio.sleep(0)
        if end is not None:
            raise end


async def test_a_task_that_fails_in_any_way_runs_again(background: Background, ends: Callable[..., float]) -> None:
    script = Script(ValueError("odd"), None, errors.unavailable("AWAY", "away"), asyncio.CancelledError())
    failures: list[Exception] = []
    with capture_logs() as logs:
        task = background.supervise("job", script.run, SOON, on_end=failures.append)
        await asyncio.wait_for(script.goes_on.wait(), 10)
    assert script.runs == 5
    assert (ends("job"), ends("job", "returned")) == (2, 2)
    assert [type(error) for error in failures] == [ValueError, TaskEndedError, errors.RyzansteinError, TaskEndedError]
    message = [line for line in logs if line["event"] == "background task ended"]
    assert [line["task"] for line in message] == ["job"] * 4
    assert isinstance(message[0]["exc_info"], ValueError), "with the stack"
    assert not task.done()


async def test_a_task_that_is_cancelled_ends_whatever_it_does(background: Background, ends: Callable[..., float]) -> None:
    script = Script()
    task = background.supervise("job", script.run, SOON)
    await asyncio.wait_for(script.goes_on.wait(), 10)
    task.cancel()
    await asyncio.wait([task], timeout=10)
    assert task.cancelled()
    paused = background.supervise("paused", Script(ValueError()).run, Backoff(60.0, 60.0))
    while not ends("paused"):  # noqa: ASYNC110 - a metric tells nobody
        await asyncio.sleep(0)
    paused.cancel()
    await asyncio.wait([paused], timeout=10)
    assert paused.cancelled()
    assert (ends("job"), ends("job", "returned")) == (0, 0)


async def test_what_is_down_is_shown_until_it_runs_again(background: Background, registry: CollectorRegistry) -> None:
    def down() -> float | None:
        return registry.get_sample_value("ryzanstein_test_background_tasks_down", {"task": "job"})

    failed = asyncio.Event()
    script = Script(ValueError())
    background.supervise("job", script.run, Backoff(0.05, 0.05), on_end=lambda _: failed.set())
    assert down() == 0
    await asyncio.wait_for(failed.wait(), 10)
    await asyncio.sleep(0)
    assert down() == 1
    await asyncio.wait_for(script.goes_on.wait(), 10)
    assert down() == 0


async def test_a_finite_task_may_return_but_not_fail(background: Background, ends: Callable[..., float]) -> None:
    script = Script(ValueError(), None)
    task = background.supervise("job", script.run, SOON, finite=True)
    await asyncio.wait_for(task, 10)
    assert (script.runs, ends("job"), ends("job", "returned")) == (2, 1, 0)


async def test_the_end_of_a_task_that_matters_is_the_processs(background: Background) -> None:
    background.supervise("job", Script(ValueError("the reason")).run, STOP)
    with pytest.raises(ValueError, match="the reason"):
        await asyncio.wait_for(background.until(asyncio.Event().wait()), 10)  # type: ignore[arg-type]
    background.supervise("other", Script(None).run, STOP)
    with pytest.raises(ValueError, match="the reason"):
        await asyncio.wait_for(background.until(asyncio.Event().wait()), 10)  # type: ignore[arg-type]


async def test_a_process_that_is_asked_to_end_does(background: Background) -> None:
    script, asked = Script(), asyncio.Event()
    background.supervise("job", script.run, STOP)
    ending = asyncio.create_task(background.until(asked.wait()))  # type: ignore[arg-type]
    await asyncio.wait_for(script.goes_on.wait(), 10)
    assert not ending.done()
    asked.set()
    await asyncio.wait_for(ending, 10)


async def test_what_fails_when_a_process_is_asked_to_end_is_not_hidden(background: Background) -> None:
    with pytest.raises(ValueError, match="drain"):
        await asyncio.wait_for(background.until(Script(ValueError("drain")).run()), 10)


async def test_a_listener_that_fails_ends_nothing(background: Background) -> None:
    heard: list[Exception] = []

    def listen(error: Exception) -> None:
        heard.append(error)
        raise KeyError

    script = Script(ValueError())
    background.supervise("job", script.run, SOON, on_end=listen)
    await asyncio.wait_for(script.goes_on.wait(), 10)
    assert [type(error) for error in heard] == [ValueError]


async def test_a_task_of_a_request_that_nobody_waits_for_does_not_fail_in_silence(
    background: Background, ends: Callable[..., float]
) -> None:
    bug = background.once("write", Script(ValueError()).run())
    refusal = background.once("write", Script(errors.unavailable("AWAY", "away")).run())
    background.once("write", Script().run()).cancel()
    await asyncio.wait([bug, refusal], timeout=10)
    await asyncio.sleep(0)
    assert ends("write") == 1, "a refusal is its caller's, a cancellation nobody's"


@pytest.mark.long
async def test_what_callbacks_and_others_tasks_raise_is_counted(background: Background, ends: Callable[..., float]) -> None:
    background.watch_loop()
    asyncio.get_running_loop().call_soon(lambda: {}["k"])
    task = asyncio.get_running_loop().create_task(Script(ValueError()).run())
    while not task.done():  # noqa: ASYNC110 - waiting for it would retrieve what it raised
        await asyncio.sleep(0)
    del task
    gc.collect()
    await asyncio.sleep(0)
    assert ends("event_loop") == 2


async def test_a_supervised_task_belongs_to_no_request(background: Background) -> None:
    seen: list[dict[str, Any]] = []

    async def run() -> None:
        seen.append(get_contextvars())

    with bound_contextvars(request_id="r"):
        await asyncio.wait_for(background.supervise("job", run, finite=True), 10)
    assert seen == [{}]


def test_pauses_grow_to_their_bound_and_are_forgotten_after_a_stretch_of_health() -> None:
    streak = Streak(Backoff(1.0, 8.0, 60.0))
    pauses = [streak.ended(1.0) for _ in range(2000)]
    for pause_s, longest_s in zip(pauses, (1.0, 2.0, 4.0, *[8.0] * 1997), strict=True):
        assert longest_s / 2 <= pause_s <= longest_s
    assert len(set(pauses[3:])) > 1000, "by chance"
    assert streak.ended(60.0) <= 1.0
    assert streak.ends == 1
