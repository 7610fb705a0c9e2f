"""Ranks get the tokens of a large vocabulary before the first constraint, and at a time when that delays nobody."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ryzanstein import errors
from ryzanstein.background import Background
from ryzanstein.worker.agent.versions.early_tokens import LARGE_VOCABULARY, EarlyTokens
from ryzanstein.worker.telemetry import WorkerTelemetry


class Judge:
    """Reads a vocabulary when the test releases it."""

    able = True

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.table: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def tokens(self, model: Any) -> bytes:
        self.asked.append(model)
        return await self.table


class Ranks:
    """What is sent to them, and whether anything runs."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, bytes]] = []
        self.idle = asyncio.Event()

    async def until_idle(self) -> None:
        await self.idle.wait()


def text(vocab_size: int = LARGE_VOCABULARY + 1, embedding: object = None) -> Any:
    return SimpleNamespace(vocab_size=vocab_size, embedding=embedding, name="m")


@pytest.fixture
async def parts() -> Any:
    judge, ranks = Judge(), Ranks()
    background: Background = WorkerTelemetry().background
    early = EarlyTokens(judge, background, ranks.until_idle, lambda model, table: ranks.told.append((model, table)))  # type: ignore[arg-type]
    yield judge, ranks, early
    judge.table.cancel()
    await background.close()


async def test_a_table_that_comes_while_something_runs_is_sent_when_nothing_does(parts: Any) -> None:
    judge, ranks, early = parts
    model = text()
    early.expect(model)
    assert early.known(model) is None
    judge.table.set_result(b"table")
    await asyncio.sleep(0.01)
    assert (early.known(model), ranks.told) == (b"table", [])
    ranks.idle.set()
    await asyncio.sleep(0.01)
    assert ranks.told == [(model, b"table")]
    assert early.known(text()) is None, "another model"


@pytest.mark.parametrize("model", [text(LARGE_VOCABULARY), text(embedding=object())])
async def test_small_vocabularies_and_embeddings_are_not_read(parts: Any, model: Any) -> None:
    judge, _, early = parts
    early.expect(model)
    await asyncio.sleep(0.01)
    assert judge.asked == []


async def test_a_table_that_cannot_be_read_is_left_to_the_first_constraint(parts: Any) -> None:
    judge, ranks, early = parts
    ranks.idle.set()
    early.expect(model := text())
    judge.table.set_exception(errors.unavailable("NODE_NOT_READY", "ended"))
    await asyncio.sleep(0.01)
    assert (early.known(model), ranks.told) == (None, [])
