"""Asks a node for a prompt's tokens, and for the text of tokens: the router has no tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ryzanstein import clock, errors
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from ryzanstein.router.nodes.calls.answer import answer_of, too_old
from ryzanstein.router.nodes.links.link import NodeLink
from ryzanstein.router.nodes.roster import Roster
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


async def infill(link: NodeLink, model: str, prefix: str, suffix: str, deadline: float) -> Infilled:
    """Returns a prompt to fill in the middle, in the tokens of the link's node.

    Raises UNAVAILABLE for a node that is lost or does not answer, NODES_TOO_OLD for one of an earlier
    version, DEADLINE_EXCEEDED after `deadline` (Unix seconds), else the node's own error.
    """
    left_s = deadline - clock.unix_s()
    if left_s <= 0:
        raise errors.deadline_exceeded()
    request = pb.TokenizeRequest(model=model, text=prefix, suffix=suffix)
    try:
        answer = await _asked(link, "Tokenize", request, min(TIMEOUT_S, left_s))
    except RyzansteinError as error:
        if error.code is not Code.DEADLINE_EXCEEDED:
            raise
        if left_s <= TIMEOUT_S:
            raise errors.deadline_exceeded() from None
        raise errors.unavailable("LINK_DOWN", f"node {link.node_id} did not answer in {TIMEOUT_S:g} s") from None
    if not answer.infill:
        raise too_old(link, "fills in no middle")
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


async def _asked(link: NodeLink, method: str, request: Any, timeout_s: float = TIMEOUT_S) -> Any:
    call = getattr(TextServiceStub(link.channel), method)(request, timeout=timeout_s)
    return await answer_of(link, call, "does not tokenize")
