"""Calls to a node beside its stream: a prompt's tokens, the text of tokens, vectors. The router has no tokenizer.

An error is in the router's terms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, NamedTuple, TypeVar

import grpc

from ryzanstein import clock, errors
from ryzanstein.embeddings import Embedded, EmbeddingRequest, EmbedInput
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from ryzanstein.router.nodes.links.link import NodeLink
from ryzanstein.router.nodes.roster import Roster
from ryzanstein.rpc.interceptors import REQUEST_ID
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import text_pb2 as pb
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.v1.embedding_pb2_grpc import EmbeddingServiceStub
from ryzanstein.v1.text_pb2_grpc import TextServiceStub
from ryzanstein.v1.worker_pb2_grpc import WorkerServiceStub
from ryzanstein.wire.embeddings import embed_to_wire, embedded_from_wire
from ryzanstein.wire.requests import conversation_to_wire, message_to_wire, template_to_wire


async def embed(link: NodeLink, request: EmbeddingRequest, inputs: Sequence[EmbedInput]) -> list[Embedded]:
    """Returns the vectors of some inputs of a request, before its deadline.

    Cancelled, or when the link ends, it also ends on the node. Raises UNAVAILABLE for a lost node,
    UNIMPLEMENTED for one of an earlier version, else the node's own error.
    """
    left_s = None if request.deadline is None else request.deadline - clock.unix_s()
    if left_s is not None and left_s <= 0:
        raise errors.deadline_exceeded()
    call = EmbeddingServiceStub(link.channel).Embed(
        embed_to_wire(request, inputs), timeout=left_s, metadata=((REQUEST_ID, request.request_id),)
    )
    try:
        answer = await answer_of(link, call, "makes no embeddings")
    except RyzansteinError as error:
        if error.code is Code.DEADLINE_EXCEEDED:
            raise errors.deadline_exceeded() from None
        raise
    if len(answer.embeddings) != len(inputs):
        raise errors.internal(f"node {link.node_id} answered {len(answer.embeddings)} of {len(inputs)} inputs")
    return embedded_from_wire(answer)


_T = TypeVar("_T")


async def answer_of(link: NodeLink, call: Awaitable[_T], lacks: str) -> _T:
    """Returns the answer to a call on the link's channel.

    Raises UNAVAILABLE when the link ends, NODES_TOO_OLD when the node does not know the call (`lacks`
    says what a node of that version does not do), else the node's own error.
    """
    try:
        return await call
    except grpc.aio.AioRpcError as failure:
        if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise too_old(link, lacks) from None
        raise error_from_rpc(failure) from None
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        # Nobody cancelled this task: the channel was closed under the call.
        raise errors.unavailable("LINK_DOWN", f"the link to node {link.node_id} ended") from None


def too_old(link: NodeLink, lacks: str) -> RyzansteinError:
    return RyzansteinError(f"node {link.node_id} is of an older version, which {lacks}", Code.UNIMPLEMENTED, "NODES_TOO_OLD")


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
    try:
        response = await WorkerServiceStub(link.channel).CountPromptTokens(request, timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as failure:
        raise error_from_rpc(failure) from None
    return int(response.tokens)


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
