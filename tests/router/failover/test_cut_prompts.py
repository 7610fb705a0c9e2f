"""Nodes with different contexts keep different parts of a prompt that does not fit: one part makes one answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ryzanstein.generation.request import PROMPT_CUTS
from ryzanstein.v1 import inference_pb2 as inference

TOKENS = 24
PROMPT = 100


def request(tokens: int = TOKENS, **sampling: Any) -> inference.StreamChatRequest:
    chat = inference.ChatRequest(
        messages=[inference.Message(role="ROLE_USER", content="hello")],
        sampling=inference.SamplingParams(max_tokens=tokens, keep_prompt_head=0, **sampling),
        session_id="s",
    )
    return inference.StreamChatRequest(chat=chat)


class Answer:
    """The numbers of the first event, and of every token: how much of the prompt it continues."""

    def __init__(self) -> None:
        self.started: list[tuple[int, int]] = []
        self.kept: list[int] = []
        self.indices: list[int] = []
        self.usage: tuple[int, int] = (0, 0)

    async def read(self, stream: Any) -> Answer:
        async for response in stream:
            event = response.event
            if event.HasField("started"):
                self.started.append((event.started.prompt_tokens, event.started.omitted_prompt_tokens))
            elif event.HasField("delta"):
                self.kept += [token // 1_000_000 for token in event.delta.token_ids]
                self.indices += [token % 1_000_000 - 1000 for token in event.delta.token_ids]
            elif event.HasField("finished"):
                self.usage = (event.finished.usage.prompt_tokens, event.finished.usage.omitted_prompt_tokens)
        return self

    def continues(self, kept: int) -> bool:
        """Whether all of the answer says that it continues so many tokens, and the client was told so."""
        given = (kept, PROMPT - kept)
        return self.started == [given] and self.usage == given and self.kept == [kept] * len(self.kept)


@pytest.fixture
async def pair(start_node: Any, start_router: Any, request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
    """A router with two nodes, of which the session's primary has more or less room than its backup."""
    first, second = request.param
    nodes = [await start_node(name, features=(PROMPT_CUTS,), step_s=0.005) for name in "ab"]
    client = await start_router(*nodes, tuning={"suspicion": {"stall_s": 0.2}})
    async for response in client.inference.StreamChat(_first()):
        if response.event.HasField("started"):
            nodes.sort(key=lambda node: bool(node.node_id != response.event.started.node_id))
    nodes[0].room, nodes[1].room = first, second
    return client, nodes[0], nodes[1]


def _first() -> inference.StreamChatRequest:
    return request(1)


@pytest.mark.parametrize("pair", [(50, 30), (30, 50)], indirect=True)
@pytest.mark.parametrize("accepted_first", ["hedge", "primary"])
async def test_a_race_between_two_cuts_is_won_by_the_one_that_was_accepted_first(
    pair: tuple[Any, Any, Any], until: Any, accepted_first: str
) -> None:
    client, primary, backup = pair
    primary.stalled = True
    backup.stalled = True
    reading = asyncio.create_task(Answer().read(client.inference.StreamChat(request())))
    await until(lambda: backup.num_running == 1)
    winner, loser = (backup, primary) if accepted_first == "hedge" else (primary, backup)
    winner.freeze_at = 0  # accepted, but without a token: the other one could be first with that
    winner.stalled = False
    await until(lambda: client.value("prompt_tokens_total", model="demo") == 7 + winner.room)
    loser.stalled = False
    await until(lambda: client.value("other_prompts_total", model="demo") == 1)
    winner.freeze_at = None
    answer = await reading
    assert answer.indices == list(range(TOKENS))
    assert answer.continues(winner.room)
    assert client.value("breaker_state", node_id=loser.node_id) == 0
    await until(lambda: loser.num_running == 0)


@pytest.mark.parametrize("pair", [(30, 50)], indirect=True)
async def test_a_failover_keeps_what_the_first_node_kept(pair: tuple[Any, Any, Any]) -> None:
    client, primary, _ = pair
    primary.die_at = 5
    answer = await Answer().read(client.inference.StreamChat(request()))
    assert answer.indices == list(range(TOKENS))
    assert answer.continues(30)
    assert client.value("other_prompts_total", model="demo") == 0


@pytest.mark.parametrize("pair", [(30, 50)], indirect=True)
async def test_a_node_that_keeps_something_else_although_it_was_told_is_not_asked_again(
    pair: tuple[Any, Any, Any], start_node: Any, until: Any
) -> None:
    client, primary, backup = pair
    backup.heeds_kept = False
    primary.die_at = 5
    reading = asyncio.create_task(Answer().read(client.inference.StreamChat(request())))
    await until(lambda: client.value("other_prompts_total", model="demo") == 1)
    await until(lambda: primary.num_running == 0)
    await asyncio.sleep(0.6)  # longer than a node that failed is left alone
    assert client.value("other_prompts_total", model="demo") == 1
    await primary.start()
    answer = await reading
    assert answer.indices == list(range(TOKENS))
    assert answer.continues(30)
    assert client.value("breaker_state", node_id=backup.node_id) == 0
