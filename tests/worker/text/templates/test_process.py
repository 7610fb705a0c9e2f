"""The template process, real: whatever a template does, the next conversation is rendered."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import psutil
import pytest

from ryzanstein.backoff import Backoff
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import ChatPrompt, Message, Role
from ryzanstein.worker.telemetry.node_metrics import NodeMetrics
from ryzanstein.worker.text.programs.starting import ProgramBounds
from ryzanstein.worker.text.templates.process import TemplateProcess
from ryzanstein.worker.text.templates.rendering import TemplateSource

HELLO = ChatPrompt((Message(Role.USER, "hello"),))
PLAIN = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


def template(source: str, max_chars: int = 100_000) -> TemplateSource:
    return TemplateSource(source, {}, ("<user>", "<system>"), 2, max_chars)


@asynccontextmanager
async def running(cpu_s: float = 0.5, max_waiting: int = 64) -> AsyncIterator[tuple[TemplateProcess, NodeMetrics]]:
    telemetry = NodeMetrics()
    process = TemplateProcess(ProgramBounds(cpu_s, 128 * 2**20, max_waiting), telemetry.on_template_limit)
    telemetry.background.supervise("templates", process.run, Backoff(0.01, 0.05, 5.0))
    try:
        yield process, telemetry
    finally:
        await telemetry.background.close()


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.name() == "templates"]


def limits(telemetry: NodeMetrics, limit: str) -> float:
    return telemetry.registry.get_sample_value("ryzanstein_worker_template_limits_total", {"limit": limit}) or 0.0


LOOPS = "{% for i in range(99999) %}" * 3 + "{% set x = i %}" + "{% endfor %}" * 3
MACRO = "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}"


@pytest.mark.parametrize(
    ("source", "reason", "found"),
    [
        ("{{ messages | tojson(indent=100000000) }}", "TEMPLATE_LIMIT", ("memory", "output")),
        (LOOPS, "TEMPLATE_LIMIT", ("time",)),
        ("{{ 'a' * 10**9 }}", "TEMPLATE_LIMIT", ("memory",)),
        ("{{ messages[0].content * 10**9 }}", "TEMPLATE_LIMIT", ("memory",)),
        ("{{ messages[0].content * 100000 }}", "TEMPLATE_LIMIT", ("output",)),
        ("{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}", "TEMPLATE_LIMIT", ("output",)),
        ("{{ (messages | length + 6) ** (10 ** 8) }}", "TEMPLATE_LIMIT", ("time",)),  # one operation, which no signal stops
        ("{{ 7 ** (10 ** 8) }}", "TEMPLATE_LIMIT", ("time",)),
        (MACRO, "TEMPLATE_LIMIT", ("depth",)),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "TEMPLATE_LIMIT", ("depth", "memory")),
        ("{{ raise_exception('no system role') }}", "INVALID_ARGUMENT", ()),
        ("{{ ''.__class__.__mro__ }}", "INVALID_ARGUMENT", ()),
        ("{% if %}", "MODEL_INVALID", ()),
        ("{{ messages | no_such_filter }}", "MODEL_INVALID", ()),
    ],
)
@pytest.mark.long
async def test_a_template_that_goes_too_far_harms_nobody_else(source: str, reason: str, found: tuple[str, ...]) -> None:
    async with running() as (process, telemetry):
        asked = [process.render(template(each), HELLO) for each in (PLAIN, source, PLAIN)]
        async with asyncio.timeout(60):
            before, error, after = await asyncio.gather(*asked, return_exceptions=True)
        assert not isinstance(before, BaseException)
        assert before.text == "<user>hello"
        assert after == before
        assert isinstance(error, RyzansteinError)
        assert (error.reason, error.metadata.get("limit", "")) in [(reason, limit) for limit in found or ("",)]
        assert (error.code == Code.INVALID_ARGUMENT) == (reason == "INVALID_ARGUMENT")
        assert sum(limits(telemetry, limit) for limit in found) == len(found[:1])
        assert len(children()) == 1


async def test_the_loop_goes_on_while_a_template_does_not_end() -> None:
    async with running() as (process, _):
        stuck = asyncio.create_task(process.render(template(LOOPS), HELLO))
        lags = []
        while not stuck.done():
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            lags.append(time.perf_counter() - began)
        assert isinstance(stuck.exception(), RyzansteinError)
        assert len(lags) > 20
        assert max(lags) < 0.4, "bound for a busy machine"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_when_the_process_dies_the_next_one_answers(number: signal.Signals) -> None:
    async with running(cpu_s=5) as (process, telemetry):
        await process.render(template(PLAIN), HELLO)
        (first,) = children()
        first.suspend()
        asked = [asyncio.create_task(process.render(template(PLAIN), HELLO)) for _ in range(8)]
        await asyncio.sleep(0.05)
        os.kill(first.pid, number)
        first.resume()
        assert {answer.text for answer in await asyncio.gather(*asked)} == {"<user>hello"}
        (second,) = children()
        assert second.pid != first.pid
        ends = {"task": "templates", "outcome": "failed"}
        assert telemetry.registry.get_sample_value("ryzanstein_worker_background_task_ends_total", ends) == 1


async def test_a_process_that_does_not_answer_is_replaced() -> None:
    async with running(cpu_s=0.2) as (process, _):
        await process.render(template(PLAIN), HELLO)
        (first,) = children()
        first.suspend()
        assert (await process.render(template(PLAIN), HELLO)).text == "<user>hello"
        assert children()[0].pid != first.pid


async def test_who_leaves_disturbs_nobody() -> None:
    async with running() as (process, _):
        asked = [
            asyncio.create_task(process.render(template(PLAIN), ChatPrompt((Message(Role.USER, str(i)),)))) for i in range(20)
        ]
        await asyncio.sleep(0)
        for task in asked[::2]:
            task.cancel()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert [answer.text for answer in answers[1::2]] == [f"<user>{i}" for i in range(1, 20, 2)]


async def test_as_many_wait_as_may_and_no_more() -> None:
    async with running(max_waiting=3) as (process, _):
        asked = [asyncio.create_task(process.render(template(PLAIN), HELLO)) for _ in range(5)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert [getattr(answer, "reason", "") for answer in answers] == ["", "", "", "QUEUE_FULL", "QUEUE_FULL"]


async def test_the_process_ends_with_whoever_keeps_it() -> None:
    async with running() as (process, _):
        await process.render(template(PLAIN), HELLO)
        (child,) = children()
    assert not child.is_running()


async def test_an_ordinary_conversation_takes_little(record_property: Callable[[str, object], None]) -> None:
    """What the way through another process adds; some tenths of a millisecond when cores are free."""
    messages = tuple(Message(Role.ASSISTANT if i % 2 else Role.USER, "What is it? " * 20) for i in range(7))
    async with running() as (process, _):
        taken = []
        for _ in range(100):
            began = time.perf_counter()
            await process.render(template(PLAIN), ChatPrompt(messages))
            taken.append(time.perf_counter() - began)
    record_property("median_ms", 1000 * sorted(taken)[50])
    assert min(taken) < 0.01
