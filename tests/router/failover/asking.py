"""A conversation's request, and the nodes that answered it."""

from __future__ import annotations

from typing import Any

from ryzanstein.v1 import inference_pb2 as inference

TOKENS = 24


def request(session_id: str = "s", tokens: int = TOKENS, **sampling: Any) -> inference.StreamChatRequest:
    chat = inference.ChatRequest(
        messages=[inference.Message(role="ROLE_USER", content="hello")],
        sampling=inference.SamplingParams(max_tokens=tokens, **sampling),
        session_id=session_id,
    )
    return inference.StreamChatRequest(chat=chat)


async def read(client: Any, asked: inference.StreamChatRequest) -> tuple[list[int], list[str]]:
    """Returns the indices of an answer's tokens, and which nodes generated them."""
    indices: list[int] = []
    nodes: list[str] = []
    async for response in client.inference.StreamChat(asked):
        delta = response.event.delta
        indices += [token - 1000 for token in delta.token_ids]
        if delta.token_ids and nodes[-1:] != [delta.node_id]:
            nodes.append(delta.node_id)
    return indices, nodes
