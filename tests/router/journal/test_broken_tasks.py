"""The tasks that write the journal and keep the lease meet what nobody has thought of: they are seen to be down, run again, and
what waited is written. Inside a real router, over its gRPC face; only the journal's methods are made to fail."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from ryzanstein.router.journal.encoding import BatchWriter
from ryzanstein.router.journal.journal import JournalUnavailableError, Owner
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import journal_pb2 as pb

pytestmark = pytest.mark.long

TOKENS = 200
NEVER_THOUGHT_OF = [ValueError("not of this world"), sqlite3.ProgrammingError("closed"), KeyError("k"), MemoryError()]


def chat(tokens: int = TOKENS) -> inference.StreamChatRequest:
    messages = [inference.Message(role=inference.ROLE_USER, content="hello")]
    sampling = inference.SamplingParams(max_tokens=tokens)
    return inference.StreamChatRequest(chat=inference.ChatRequest(messages=messages, sampling=sampling))


async def read(stream: Any, until_tokens: int | None = None) -> tuple[str, list[int]]:
    """The generation's id and its tokens, to the end or until there are so many."""
    generation_id, tokens = "", []
    async for response in stream:
        event = response.event
        generation_id = generation_id or event.started.generation_id
        tokens += event.delta.token_ids
        if until_tokens is not None and len(tokens) >= until_tokens:
            break
    return generation_id, tokens


def fail(monkeypatch: pytest.MonkeyPatch, journal: Any, method: str, error: Exception) -> None:
    async def failing(*_: Any) -> None:
        raise error

    monkeypatch.setattr(journal, method, failing)


async def journalled_tokens(journal: Any, generation_id: str) -> int:
    """How many tokens another router would find."""
    head = await journal.head(generation_id)
    record = await journal.take(generation_id, head.epoch, Owner("another", "127.0.0.1:1"))
    batches = map(pb.JournalBatch.FromString, record.batches)
    return len({run.first_index + i for batch in batches for run in batch.runs for i in range(len(run.token_ids))})


@pytest.fixture
async def router(start_node: Any, start_router: Any) -> Any:
    return await start_router(await start_node("a", step_s=0.005), session_store="sqlite", lease_s=1.0)


def ends(router: Any, task: str) -> float:
    return float(router.value("background_task_ends_total", task=task, outcome="failed"))


@pytest.mark.parametrize("error", NEVER_THOUGHT_OF, ids=lambda error: type(error).__name__)
async def test_a_recorder_that_fails_is_seen_and_writes_afterwards_what_waited(
    router: Any, until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    journal = router.router.core._cluster.journal
    stream = router.inference.StreamChat(chat())
    generation_id, begun = await read(stream, 5)
    with monkeypatch.context() as broken:
        fail(broken, journal, "write", error)
        await until(lambda: router.value("journal_up") == 0)
        during_id, during = await read(router.inference.StreamChat(chat(20)))
        assert len(during) == 20, "generations go on in memory"
        await until(lambda: ends(router, "journal_recorder") > 1)
        assert router.value("journal_up") == 0, "the lease, which can be renewed, does not hide it"
        assert router.value("journal_lag_tokens") > 0
    await until(lambda: router.value("journal_up") == 1)
    _, rest = await read(stream)
    assert len(begun) + len(rest) == TOKENS
    await until(lambda: router.value("journal_lag_tokens") == 0)
    assert await journalled_tokens(journal, generation_id) == TOKENS
    assert await journalled_tokens(journal, during_id) == 20


async def test_a_removal_that_fails_is_made_up_for(
    start_node: Any, start_router: Any, until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    router = await start_router(await start_node("a"), session_store="sqlite", reattach_window_s=0.1, lease_s=1.0)
    journal = router.router.core._cluster.journal
    with monkeypatch.context() as broken:
        fail(broken, journal, "remove", ValueError("odd"))
        generation_id, _ = await read(router.inference.StreamChat(chat(5)))
        await until(lambda: ends(router, "journal_recorder") > 0)
    await until(lambda: not router.router.core._recorder.forgetting(generation_id))
    await until(lambda: router.value("journal_up") == 1)
    assert await journal.head(generation_id) is None


async def test_removals_do_not_pile_up_while_the_store_is_down(
    start_node: Any, start_router: Any, until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    router = await start_router(await start_node("a"), session_store="sqlite", reattach_window_s=0.1, lease_s=0.5)
    journal, recorder = router.router.core._cluster.journal, router.router.core._recorder
    monkeypatch.setattr("ryzanstein.router.journal.recorder.MOST_REMOVALS", 2)
    for method in ("write", "remove"):
        fail(monkeypatch, journal, method, JournalUnavailableError("gone"))
    generation_ids = [(await read(router.inference.StreamChat(chat(5))))[0] for _ in range(3)]
    await until(lambda: recorder.forgetting(generation_ids[-1]))
    await until(lambda: not recorder.forgetting(generation_ids[0]))


@pytest.mark.parametrize("error", NEVER_THOUGHT_OF, ids=lambda error: type(error).__name__)
async def test_a_lease_that_cannot_be_kept_is_seen_and_renewed_as_soon_as_it_can(
    router: Any, until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    core = router.router.core
    with monkeypatch.context() as broken:
        fail(broken, core._cluster.journal, "renew", error)
        await until(lambda: router.value("journal_up") == 0)
        _, tokens = await read(router.inference.StreamChat(chat(20)))
        assert len(tokens) == 20
        await until(lambda: ends(router, "journal_lease") > 1)
        assert router.value("journal_up") == 0, "what can be written does not hide it"
    await until(lambda: router.value("journal_up") == 1)
    assert await core._cluster.journal.find(core._owner.owner_id) is not None


async def test_one_generation_that_cannot_be_journalled_keeps_no_other_from_it(
    router: Any, until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = router.router.core
    poisoned_id, _ = await read(router.inference.StreamChat(chat()), 5)
    writer = core._recorder._entries[poisoned_id].writer
    encode = BatchWriter.next_batch

    def poisoned(self: BatchWriter) -> bytes:
        if self is writer:
            raise ValueError("cannot be encoded")
        return encode(self)

    monkeypatch.setattr(BatchWriter, "next_batch", poisoned)
    generation_id, tokens = await read(router.inference.StreamChat(chat(20)))
    assert len(tokens) == 20
    await until(lambda: router.value("journal_unwritable_total") == 1)
    await until(lambda: router.value("journal_lag_tokens") == 0)
    assert router.value("journal_up") == 1
    assert await journalled_tokens(core._cluster.journal, generation_id) == 20


@pytest.mark.parametrize("error", NEVER_THOUGHT_OF, ids=repr)
async def test_a_client_that_attaches_meanwhile_is_asked_to_come_back(
    router: Any, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, router.router.core._cluster.journal, "head", error)
    request = inference.AttachGenerationRequest(generation_id="of-another-router")
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await read(router.inference.AttachGeneration(request))
    reported = error_from_rpc(failure.value)
    assert (reported.reason, reported.retry_after_s) == ("JOURNAL_UNAVAILABLE", 1.0)


async def test_a_store_that_fails_in_a_way_nobody_thought_of_stops_no_drain(
    router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = router.router.core._cluster.journal
    stream = router.inference.StreamChat(chat())
    _, begun = await read(stream, 5)
    with monkeypatch.context() as broken:
        for method in ("renew", "resign"):
            fail(broken, journal, method, ValueError("odd"))
        await router.router.core.drain()
        _, rest = await read(stream)
        assert len(begun) + len(rest) == TOKENS
        await router.router.core.close()
