"""Measuring what models would take: in a thread, once, and again what failed."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from ryzanstein import errors
from ryzanstein.cluster import ModelNeed
from ryzanstein.observe.metrics import new_registry
from ryzanstein.process.background import Background
from ryzanstein.worker.agent.memory import needs as module
from ryzanstein.worker.agent.memory.needs import MAX_PATHS, ModelNeeds


class Measure:
    """Counts calls, off the loop's thread; fails while `broken`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.broken = False
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, path: Path) -> int:
        assert threading.current_thread() is not threading.main_thread()
        self.gate.wait(10)
        self.calls.append(str(path))
        if self.broken:
            raise errors.failed_precondition("MODEL_REFUSED", f"{path}: no such file")
        return len(str(path))


def needs(measure: Measure) -> ModelNeeds:
    return ModelNeeds(measure, Background("test", new_registry()))


async def known(measured: ModelNeeds, *paths: str) -> tuple[ModelNeed, ...]:
    async with asyncio.timeout(10):
        while len(answer := measured.ask(paths)) < len(paths):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return answer


async def test_each_directory_is_measured_once_however_often_it_is_asked_for() -> None:
    measure = Measure()
    measured = needs(measure)
    measure.gate.clear()
    assert measured.ask(("/ab", "/c")) == measured.ask(("/ab",)) == ()
    assert measured.known("/ab") == 0
    measure.gate.set()
    assert await known(measured, "/ab", "/c") == (ModelNeed("/ab", 3), ModelNeed("/c", 2))
    assert sorted(measure.calls) == ["/ab", "/c"]
    assert measured.known("/ab") == 3
    assert await measured.of("/ab") == ModelNeed("/ab", 3)
    assert measure.calls.count("/ab") == 2, "its files may have changed"


async def test_what_cannot_be_served_is_measured_again_later(monkeypatch) -> None:
    measure = Measure()
    measured = needs(measure)
    measure.broken = True
    (need,) = await known(measured, "/x")
    assert need == ModelNeed("/x", error="/x: no such file")
    measured.ask(("/x",))
    await asyncio.sleep(0.05)
    assert measure.calls == ["/x"]
    measured.ask(())
    assert measured.ask(("/x",)) == (), "it is asked for anew: it may have been repaired"
    await known(measured, "/x")
    assert measure.calls == ["/x"] * 2
    measure.broken = False
    monkeypatch.setattr(module, "_AGAIN_S", 0.0)
    async with asyncio.timeout(10):
        while (await known(measured, "/x"))[0].error:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert measured.known("/x") == 2


async def test_the_oldest_needs_are_forgotten_beyond_the_bound() -> None:
    measured = needs(Measure())
    for number in range(MAX_PATHS + 1):
        await measured.of(f"/{number:03}")
    assert measured.known("/000") == 0
    assert measured.known("/001") == measured.known(f"/{MAX_PATHS:03}") == 4
