"""What a router tells a node of the others: where a generation goes next, and who had the conversation before."""

from __future__ import annotations

import asyncio
from typing import Any

from ryzanstein.generation.prompts import ChatPrompt, Message, Role
from ryzanstein.generation.request import GenerationRequest, SamplingParams
from ryzanstein.v1 import inference_pb2 as inference


async def ask(client: Any, session_id: str, tokens: int = 3) -> str:
    """Runs one turn; returns the node that generated its last token."""
    chat = inference.ChatRequest(
        messages=[inference.Message(role="ROLE_USER", content="hello")],
        sampling=inference.SamplingParams(max_tokens=tokens),
        session_id=session_id,
    )
    answered = ""
    async for response in client.inference.StreamChat(inference.StreamChatRequest(chat=chat)):
        answered = response.event.delta.node_id or answered
    return answered


async def test_the_backup_is_the_node_that_continues_when_the_first_dies(
    start_node: Any, start_router: Any, until: Any
) -> None:
    nodes = {name: await start_node(name, step_s=0.02) for name in "abc"}
    client = await start_router(*nodes.values())
    asking = asyncio.create_task(ask(client, "s", 40))
    await until(lambda: any(node.submits for node in nodes.values()))
    ((first, submit),) = [(name, node.submits[0]) for name, node in nodes.items() if node.submits]
    backup = submit.backup
    assert backup.address == nodes[backup.node_id].address
    await asyncio.sleep(0.1)
    await nodes[first].die()
    assert await asking == backup.node_id
    (again,) = nodes[backup.node_id].submits
    assert again.backup.node_id == next(name for name in nodes if name not in (first, backup.node_id))
    assert again.conversation_key == submit.conversation_key != b""


async def test_a_later_turn_names_the_node_that_may_have_the_earlier_ones(
    start_node: Any, start_router: Any, until: Any
) -> None:
    nodes = {name: await start_node(name) for name in "ab"}
    client = await start_router(*nodes.values())
    first = await ask(client, "s")
    (other,) = set(nodes) - {first}
    assert not nodes[first].submits[0].HasField("previous"), "it is the first turn"
    assert await ask(client, "s") == first
    assert nodes[first].submits[1].previous.node_id == other, "the node may have restarted: its backup was sent the pages"
    await nodes[first].die()
    await until(lambda: client.router.core.models()[0].ready_nodes == 1)
    assert await ask(client, "s") == other
    assert not nodes[other].submits[0].HasField("backup"), "there is no other node"
    await nodes[first].start()
    await until(lambda: client.router.core.models()[0].ready_nodes == 2)
    await asyncio.sleep(1.2)  # its breaker lets a request through again
    assert await ask(client, "s") == first
    assert nodes[first].submits[2].previous.node_id == other, "it answered the turn before"
    keys = {submit.conversation_key for node in nodes.values() for submit in node.submits}
    assert len(keys) == 1
    await ask(client, "another")
    assert len({submit.conversation_key for node in nodes.values() for submit in node.submits}) == 2


async def test_a_request_outside_of_a_conversation_has_a_backup_and_no_key(start_node: Any, start_router: Any) -> None:
    nodes = [await start_node(name) for name in "ab"]
    client = await start_router(*nodes)
    await ask(client, "")
    (submit,) = [submit for node in nodes for submit in node.submits]
    assert submit.backup.node_id in ("a", "b")
    assert submit.conversation_key == b""
    assert not submit.HasField("previous")


async def test_what_is_kept_is_a_conversation_by_its_beginning(start_node: Any, start_router: Any) -> None:
    nodes = {name: await start_node(name) for name in "ab"}
    core = (await start_router(*nodes.values())).router.core

    async def turn(*texts: str, kept: bool) -> None:
        roles = (Role.USER, Role.ASSISTANT)
        messages = tuple(Message(roles[number % 2], text) for number, text in enumerate(texts))
        request = GenerationRequest("", ChatPrompt(messages), SamplingParams(max_tokens=3), kept=kept)
        generation_id = await core.submit(request)
        async for _ in core.follow(generation_id):
            pass

    await turn("hello", kept=True)
    await turn("hello", "there", "again", kept=True)
    await turn("hello", "there", "again", kept=False)
    await turn("good bye", kept=True)
    submits = sorted(
        (submit for node in nodes.values() for submit in node.submits), key=lambda submit: len(submit.conversation_key)
    )
    keys = [submit.conversation_key for submit in submits]
    assert keys[0] == b""
    assert len(set(keys)) == 3, "two turns of one conversation, another one, and none"
    later = [submit for submit in submits if submit.HasField("previous")]
    assert [submit.previous.node_id == submit.backup.node_id for submit in later] == [True], "the one that has a history"
