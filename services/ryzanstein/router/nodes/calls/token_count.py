"""Counts a prompt's tokens on a node: the router has no tokenizer."""

from __future__ import annotations

from ryzanstein import errors
from ryzanstein.generation.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from ryzanstein.router.nodes.roster import Roster
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.wire.requests import conversation_to_wire, message_to_wire

TIMEOUT_S = 10.0


async def count_prompt_tokens(links: Roster, model: str, prompt: Prompt) -> int:
    """Returns the number of tokens, template included.

    Raises NO_NODES when no ready node serves the model, otherwise the node's own error.
    """
    request = worker.CountPromptTokensRequest(model=model)
    match prompt:
        case TokenPrompt(token_ids):
            return len(token_ids)
        case ChatPrompt() as chat if not chat.is_plain:
            request.conversation.CopyFrom(conversation_to_wire(chat))
        case ChatPrompt(messages):
            request.messages.messages.extend(message_to_wire(message) for message in messages)
        case TextPrompt(text):
            request.text = text
    link = links.least_loaded(model)
    if link is None:
        raise errors.no_nodes(model, "the prompt's tokens cannot be counted")
    return await link.count_tokens(request, TIMEOUT_S)
