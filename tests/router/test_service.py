"""The gRPC face over scripted nodes: what a client sees on good days."""

from __future__ import annotations

from typing import Any

from ryzanstein.v1 import inference_pb2 as inference


def chat(text: str = "hello", **more: Any) -> inference.ChatRequest:
    sampling = inference.SamplingParams(**more.pop("sampling", {}))
    return inference.ChatRequest(messages=[inference.Message(role="ROLE_USER", content=text)], sampling=sampling, **more)


async def read(stream: Any) -> list[inference.GenerationEvent]:
    return [response.event async for response in stream]


async def test_a_stream_is_started_then_every_index_once_then_finished(start_node: Any, start_router: Any) -> None:
    node = await start_node("a")
    client = await start_router(node)
    events = await read(client.inference.StreamChat(inference.StreamChatRequest(chat=chat(sampling={"max_tokens": 20}))))
    assert events[0].started.node_id == "a"
    assert events[0].started.prompt_tokens == 7
    deltas = [event.delta for event in events[1:-1]]
    assert [delta.first_index for delta in deltas] == [sum(len(d.token_ids) for d in deltas[:i]) for i in range(len(deltas))]
    assert [token for delta in deltas for token in delta.token_ids] == [1000 + i for i in range(20)]
    assert "".join(delta.text for delta in deltas) == "".join(f"0.{i} " for i in range(20))
    assert events[-1].finished.usage.completion_tokens == 20
