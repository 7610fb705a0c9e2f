"""A client that is closed, forked or taken to another event loop says so; what it still reads ends at the server too."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import weakref
from typing import Any

import pytest

from ryzanstein.client import AsyncClient, Client, Text
from ryzanstein.client import errors as raised
from ryzanstein.errors import Code

CLOSED = r"^this client is closed; make another one$"
READERS = 5


@pytest.fixture
def slow(cluster: Any) -> None:
    cluster.step_s, cluster.num_tokens = 0.02, 10_000


def test_closing_ends_what_threads_read(start_router: Any, cluster: Any, slow: None) -> None:
    routers = [start_router(), start_router()]
    client = Client([router.address for router in routers])
    began = threading.Barrier(READERS + 1)
    ended: list[raised.AnswerCancelled] = []

    def read() -> None:
        stream = client.stream("hello")
        next(event for event in stream if isinstance(event, Text))
        began.wait(20)
        with pytest.raises(raised.AnswerCancelled, match="the client was closed") as failed:
            stream.finish()
        ended.append(failed.value)

    threads = [threading.Thread(target=read) for _ in range(READERS)]
    for thread in threads:
        thread.start()
    began.wait(20)
    client.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert all(error.partial is not None and error.partial.text for error in ended)
    assert sorted(cluster.cancelled) == sorted(error.partial.generation_id for error in ended if error.partial is not None)
    assert len(set(cluster.cancelled)) == READERS
    client.close()


async def test_closing_ends_what_tasks_read(start_router: Any, cluster: Any, slow: None) -> None:
    client = AsyncClient([start_router().address, start_router().address])
    streams = [client.stream("hello") for _ in range(READERS)]
    for stream in streams:
        await anext(stream)
    tasks = [asyncio.create_task(stream.finish()) for stream in streams]
    await asyncio.sleep(0.1)
    await client.close()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(ended, raised.AnswerCancelled)
        assert (ended.code, ended.message) == (Code.CANCELLED, "the client was closed before the answer ended")
    assert sorted(cluster.cancelled) == sorted(stream.generation_id for stream in streams)
    await client.close()


def test_closing_ends_a_stream_that_waits_for_a_router(faces: Any) -> None:
    """Nothing is there to cancel: no router ever answered."""
    began = time.monotonic()
    if faces.kind == "sync":
        client = Client("127.0.0.1:1", patience_s=60)
        threading.Timer(0.5, client.close).start()
        with pytest.raises(raised.AnswerCancelled):
            client.chat("hello")
    else:

        async def ask() -> None:
            client = AsyncClient("127.0.0.1:1", patience_s=60)
            asyncio.get_running_loop().call_later(0.5, lambda: closing.append(asyncio.ensure_future(client.close())))
            with pytest.raises(raised.AnswerCancelled):
                await client.chat("hello")

        closing: list[Any] = []
        asyncio.run(ask())
    assert time.monotonic() - began < 20


def test_a_closed_client_says_so_at_each_use(start_router: Any) -> None:
    client = Client(start_router().address)
    stream, early = client.stream("hello"), client.stream("hello")
    next(early)
    client.close()
    uses = (
        lambda: client.chat("hello"),
        client.models,
        lambda: client.cancel("generation-0"),
        lambda: client.attach(early.position),
        lambda: client.sessions.get("a"),
        lambda: next(stream),
    )
    for use in uses:
        with pytest.raises(RuntimeError, match=CLOSED):
            use()
    with pytest.raises(raised.AnswerCancelled):
        early.finish()


async def test_a_closed_client_of_a_loop_says_so_at_each_use(start_router: Any) -> None:
    client = AsyncClient(start_router().address)
    stream = client.stream("hello")
    await client.close()
    for use in (client.models, lambda: client.cancel("generation-0"), lambda: anext(stream), lambda: client.chat("hello")):
        with pytest.raises(RuntimeError, match=CLOSED):
            await use()


def test_a_stream_that_nobody_holds_any_more_is_left(start_router: Any, slow: None) -> None:
    with Client([start_router().address, start_router().address]) as client:
        stream = client.stream("hello")
        next(stream)
        held = weakref.ref(stream)
        del stream
        gc.collect()
        assert held() is None


async def test_a_stream_of_a_loop_that_nobody_holds_any_more_is_left(start_router: Any, slow: None) -> None:
    async with AsyncClient([start_router().address, start_router().address]) as client:
        stream = client.stream("hello")
        await anext(stream)
        held = weakref.ref(stream)
        del stream
        gc.collect()
        assert held() is None


def test_a_call_that_is_tried_again_ends_when_the_client_is_closed(start_router: Any) -> None:
    client = Client("127.0.0.1:1", patience_s=60)
    threading.Timer(0.5, client.close).start()
    with pytest.raises(RuntimeError, match=CLOSED):
        client.models()


def test_a_client_belongs_to_one_event_loop(start_router: Any) -> None:
    client = AsyncClient(start_router().address)
    assert [model.name for model in asyncio.run(client.models())] == ["m"]
    with pytest.raises(RuntimeError, match="another event loop; make one in each"):
        asyncio.run(client.models())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_client_says_that_it_was_forked_and_its_parent_goes_on(start_router: Any) -> None:
    """No call runs while the process forks: gRPC itself may crash then."""
    client = Client(start_router().address, learn_routers=False)
    client.models()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        said = ""
        for use in (client.models, lambda: client.chat("hello")):
            try:
                use()
            except RuntimeError as error:
                said += f"{error}\n"
        client.close()
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    assert said.count("made before a fork; make one in the child process") == 2
    assert client.chat("hello").finish_reason == "stop"
    client.close()
