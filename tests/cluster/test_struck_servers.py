"""Nodes beside llama.cpp servers that are killed, stopped and cut off all the time, while answers are read.

By default 30 times; RYZANSTEIN_STRIKES=500 takes half an hour, with `-o faulthandler_timeout=7200`.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.cluster.test_engines import Servers, file

from ryzanstein.cli.processes.cluster import OWN_RANKS, ClusterSpec
from ryzanstein.demo import MODEL_DIR

__all__ = ["file"]

pytestmark = pytest.mark.lab
NUM_STRIKES = int(os.environ.get("RYZANSTEIN_STRIKES", "30"))
NUM_CLIENTS = 3
QUESTIONS = [f"Count from {n} to {n + 50}." for n in (1, 3, 7)]
KINDS = ("kill", "cut", "stop", "kill", "cut")
RECOVERY = '{"recovery": {"crash_limit": 100000, "loss_limit": 100000}}'


class Relay:
    """Passes connections on to a server, until they are cut."""

    def __init__(self, url: str) -> None:
        self._target = int(url.rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._target), 1.0)
                except OSError:
                    near.close()
                    continue
                far.settimeout(None)
                self._open |= {near, far}
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._open.discard(source)
        source.close()

    def cut(self) -> None:
        """Ends all connections in the middle of whatever they carry."""
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()


class Stage:
    """Two servers behind relays, a node beside each, and a node of ours in reserve."""

    def __init__(self, servers: Servers, relays: list[Relay], harness: Any) -> None:
        self.servers, self.relays, self.harness = servers, relays, harness

    def strike(self, number: int, kind: str) -> None:
        """Strikes a server, and heals it."""
        if kind == "cut":
            self.relays[number].cut()
            return
        self.servers.signal(number, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        time.sleep(0.3 if kind == "kill" else 2.8)
        self.servers.heal()


@pytest.fixture(scope="module")
def stage(file: Any, new_harness: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    servers = Servers(file, tmp_path_factory.mktemp("struck"), 2)
    relays = [Relay(url) for url in servers.urls]
    engines = (*(relay.url for relay in relays), OWN_RANKS)
    settings = {f"node-{number}": {"tuning": RECOVERY} for number in range(2)}
    try:
        for harness in new_harness(ClusterSpec(MODEL_DIR, num_nodes=3, tp=1, engines=engines, settings=settings)):
            yield Stage(servers, relays, harness)
    finally:
        servers.close()
        for relay in relays:
            relay.close()


@pytest.mark.timeout(7200)
def test_no_token_is_lost_or_repeated_by_servers_that_are_struck(stage: Stage) -> None:
    chat, over = stage.harness.client.chat, threading.Event()
    sampling: dict[str, Any] = {"max_tokens": 90, "ignore_eos": False}
    whole = {each: chat(each, **sampling).token_ids for each in QUESTIONS}

    def ask(client: int) -> tuple[int, int]:
        """Asks until all strikes are over; returns the answers and those of several nodes."""
        count = moved = 0
        while not over.is_set():
            question = QUESTIONS[(client + count) % len(QUESTIONS)]
            answer = chat(question, user=f"{client} {count}", **sampling)  # asserts that each index comes once
            assert answer.token_ids == whole[question]
            count, moved = count + 1, moved + (len(set(answer.nodes)) > 1)
        return count, moved

    chance = random.Random(38)
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        asking = [pool.submit(ask, number) for number in range(NUM_CLIENTS)]
        try:
            for number in range(NUM_STRIKES):
                time.sleep(chance.uniform(0.0, 0.4))
                stage.strike(number % 2, KINDS[number % len(KINDS)])
                if number % 5 == 4:
                    stage.harness.cluster.wait_nodes(3, 60)
                if number % 50 == 49:
                    print(f"{number + 1} strikes", flush=True)
                assert not any(each.done() for each in asking), [each.exception() for each in asking if each.done()]
        finally:
            over.set()
        counts = [each.result(60) for each in asking]
    answers, moved = (sum(column) for column in zip(*counts, strict=True))
    print(f"{NUM_STRIKES} strikes, {answers} answers, {moved} of several nodes, all equal")
    assert moved >= NUM_STRIKES // 5
