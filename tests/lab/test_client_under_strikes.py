"""The clients on a real cluster that is struck again and again: each answer is the undisturbed one, and none begins twice."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.client import Answer, AsyncClient, Client, ClientError
from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.soak.strikes import STRIKES

pytestmark = [pytest.mark.cluster, pytest.mark.lab, pytest.mark.timeout(600)]

STRUCK_S, STREAMS = 60.0, 16
AFTER_S = 5.0
ORDER = ("kill_router", "kill_node", "stop_router", "stop_node", "kill_rank", "stop_orchestrator")
QUESTIONS = tuple(f"Count from {first} to {first + 60}." for first in range(1, 9))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    spec = ClusterSpec(MODEL_DIR, num_nodes=3, tp=1, num_routers=3, state_dir=tmp_path)
    with LocalCluster(spec) as started:
        yield started


class Asked:
    """What both clients were answered: each answer with its question."""

    def __init__(self) -> None:
        self.answers: list[tuple[str, Answer]] = []
        self.failures: list[str] = []
        self.ends = threading.Event()

    def questions(self, number: int) -> Iterator[str]:
        rng = random.Random(number)
        while not self.ends.is_set():
            yield rng.choice(QUESTIONS)

    def ended(self, question: str, answer: Answer) -> None:
        self.answers.append((question, answer))


def blocking(addresses: list[str], number: int, asked: Asked) -> None:
    with Client(addresses, stall_s=2.0) as client:
        for question in asked.questions(number):
            try:
                asked.ended(question, client.chat(question, temperature=0.0))
            except ClientError as error:
                asked.failures.append(f"sync: {type(error).__name__} {error}")


async def awaited(client: AsyncClient, number: int, asked: Asked) -> None:
    for question in asked.questions(number):
        try:
            asked.ended(question, await client.chat(question, temperature=0.0))
        except ClientError as error:
            asked.failures.append(f"async: {type(error).__name__} {error}")


async def _ending(asked: Asked, strikes: Coroutine[Any, Any, None]) -> None:
    """Lets nobody ask on after a strike that failed."""
    try:
        await strikes
    finally:
        asked.ends.set()


async def test_every_answer_is_the_undisturbed_one(cluster: LocalCluster) -> None:
    addresses = list(cluster.router_addresses)
    async with AsyncClient(addresses) as client:
        undisturbed = {question: (await client.chat(question, temperature=0.0)).token_ids for question in QUESTIONS}
    asked = Asked()
    threads = [threading.Thread(target=blocking, args=(addresses, number, asked)) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    by_name, struck = {strike.name: strike for strike in STRIKES}, list[str]()

    async def strikes() -> None:
        """Each at least once, however long a service takes to come back on this machine."""
        began = time.monotonic()
        for name in itertools.cycle(ORDER):
            if len(struck) >= len(ORDER) and time.monotonic() - began > STRUCK_S:
                break
            await asyncio.sleep(2.0)
            struck.append(name)
            await by_name[name].act(cluster)
        await asyncio.sleep(AFTER_S)

    async with AsyncClient(addresses, stall_s=2.0) as client:
        await asyncio.gather(
            _ending(asked, strikes()), *(awaited(client, STREAMS + number, asked) for number in range(STREAMS))
        )
    for thread in threads:
        await asyncio.to_thread(thread.join, 120)
        assert not thread.is_alive()
    assert asked.failures == []
    wrong = [(question, answer.token_ids) for question, answer in asked.answers if answer.token_ids != undisturbed[question]]
    assert wrong == []
    ids = [answer.generation_id for _, answer in asked.answers]
    assert len(set(ids)) == len(ids)
    summary: dict[str, Any] = {
        "answers": len(ids),
        "moves": sum(len(answer.moves) for _, answer in asked.answers),
        "reattaches": sum(answer.reattaches for _, answer in asked.answers),
        "longest_pause_s": max(answer.longest_pause_s for _, answer in asked.answers),
        "strikes": struck,
    }
    print(summary)
    assert summary["moves"] > 0, summary
    assert summary["reattaches"] > 0, summary
