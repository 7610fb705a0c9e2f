"""Asks a node for a prompt's tokens, and for the text of tokens: the router has no tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import grpc

from ryzanstein import errors
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from ryzanstein.router.nodes.links.link import NodeLink
from ryzanstein.router.nodes.roster import Roster
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import text_pb2 as pb
from ryzanstein.v1.text_pb2_grpc import TextServiceStub
from ryzanstein.wire.requests import conversation_to_wire, template_to_wire

TIMEOUT_S = 10.0


class Tokenized(NamedTuple):
    """A prompt's tokens. `texts` are empty unless they were asked for."""

    token_ids: Sequence[int]
    texts: Sequence[str]


async def tokenize(links: Roster, model: str, prompt: Prompt, *, special: bool, with_texts: bool) -> Tokenized:
    """Returns a prompt's tokens, of a chat with its template.

    `special`: a text has the tokens that the tokenizer puts around it. Raises NO_NODES when no ready
    node serves the model, otherwise the node's own error.
    """
    request = pb.TokenizeRequest(model=model, with_texts=with_texts)
    match prompt:
        case TokenPrompt(token_ids):
            return Tokenized(token_ids, ())
        case ChatPrompt() as chat:
            request.conversation.CopyFrom(conversation_to_wire(chat))
            if (options := template_to_wire(chat.template)) is not None:
                request.template_options.CopyFrom(options)
        case TextPrompt(text):
            request.text, request.add_special_tokens = text, special
    answer = await _asked(_link(links, model), "Tokenize", request)
    return Tokenized(answer.token_ids, answer.texts)


class Infilled(NamedTuple):
    """A prompt that is answered with the middle of two texts, and what ends the answer."""

    token_ids: Sequence[int]
    stop_token_ids: Sequence[int]


async def infill(links: Roster, model: str, prefix: str, suffix: str) -> Infilled:
    """Returns a prompt to fill in the middle. Raises as `tokenize` does, and NODES_TOO_OLD if all nodes are."""
    request = pb.TokenizeRequest(model=model, text=prefix, suffix=suffix)
    link, too_old = _link(links, model), set[str]()
    while not (answer := await _asked(link, "Tokenize", request)).infill:
        too_old.add(link.node_id)
        if (other := links.least_loaded(model, too_old)) is None:
            text = f"node {link.node_id} is of an older version, which fills in no middle"
            raise RyzansteinError(text, Code.UNIMPLEMENTED, "NODES_TOO_OLD")
        link = other
    return Infilled(answer.token_ids, answer.stop_token_ids)


async def detokenize(links: Roster, model: str, token_ids: Sequence[int]) -> str:
    """Returns the text of tokens. Raises as `tokenize` does."""
    request = pb.DetokenizeRequest(model=model, token_ids=token_ids)
    return str((await _asked(_link(links, model), "Detokenize", request)).text)


def _link(links: Roster, model: str) -> NodeLink:
    link = links.least_loaded(model)
    if link is None:
        raise errors.no_nodes(model, "no node can tokenize")
    return link


async def _asked(link: NodeLink, method: str, request: Any) -> Any:
    try:
        return await getattr(TextServiceStub(link.channel), method)(request, timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as failure:
        if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise RyzansteinError(
                f"node {link.node_id} is of an older version, which does not tokenize", Code.UNIMPLEMENTED, "NODES_TOO_OLD"
            ) from None
        raise error_from_rpc(failure) from None
