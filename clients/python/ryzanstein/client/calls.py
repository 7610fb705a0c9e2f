"""The calls beside streams: what is asked, what the response is to the caller, and when a call is repeated. No IO.

`repeated` and `cancelling` say step by step what to do. A driver does a step, and sends the response back or throws the error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ryzanstein.client import errors
from ryzanstein.client.answer import Answer
from ryzanstein.client.conversation import SessionView, new_session_id
from ryzanstein.client.following.learning import ASK_S, Learning
from ryzanstein.client.following.retries import Bounds, Retries
from ryzanstein.client.following.routers import RouterChoice
from ryzanstein.client.requests import Messages, Options, messages_of
from ryzanstein.client.tools import call_tool, result_of
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.v1 import embedding_pb2, embedding_pb2_grpc, inference_pb2_grpc
from ryzanstein.v1 import inference_pb2 as pb

CANCEL_S, CANCEL_TRIES = 2.0, 3
"""How long a cancellation is tried, and how long what it ends is read on."""
_PAGE = 1000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Unary(Generic[T]):
    """A call, and how its response is read."""

    stub: Callable[[Any], Any]
    method: str
    request: Any
    read: Callable[[Any], T]


@dataclass(frozen=True, slots=True)
class Call:
    """Send this to this router. `timeout_s` None: without a deadline."""

    router: str
    unary: Unary[Any]
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


Steps = Generator[Call | Pause, Any, T]


def repeated(unary: Unary[T], routers: RouterChoice, retries: Retries, bounds: Bounds) -> Steps[T]:
    """Makes a call that changes nothing twice, until a router answers it. Raises ClientError."""
    while True:
        router = routers.current(time.monotonic())
        try:
            response = yield Call(router, unary, _left_s(bounds.deadline))
        except RyzansteinError as error:
            yield Pause(retries.failed(error, router, time.monotonic(), begun=False))
        else:
            retries.heard(router)
            return unary.read(response)


def cancelling(generation_id: str, routers: RouterChoice) -> Steps[None]:
    """Ends a generation, at whatever router. One that has ended is no error. Raises ClientError."""
    request, deadline = pb.CancelGenerationRequest(generation_id=generation_id), time.monotonic() + CANCEL_S
    unary = Unary(inference_pb2_grpc.InferenceServiceStub, "CancelGeneration", request, lambda _: None)
    for tried in range(1, CANCEL_TRIES + 1):
        router = routers.current(time.monotonic())
        try:
            yield Call(router, unary, max(0.01, deadline - time.monotonic()))
            return
        except RyzansteinError as error:
            if error.code is Code.NOT_FOUND:
                return
            if tried == CANCEL_TRIES or time.monotonic() >= deadline:
                raise errors.Unavailable.of(error) from error
            routers.failed(router, time.monotonic(), error.message)


def learning(found: Learning, routers: RouterChoice) -> Steps[None]:
    """Asks a router for the other ones, then these whether they are reached. Raises nothing."""
    from ryzanstein.v1 import router_pb2, router_pb2_grpc  # not needed by who does not learn

    unary = Unary(router_pb2_grpc.RouterServiceStub, "ListRouters", router_pb2.ListRoutersRequest(), lambda response: response)
    router = routers.current(time.monotonic())
    try:
        response = yield Call(router, unary, ASK_S)
    except RyzansteinError as error:
        found.failed(error, time.monotonic())
        return
    for address in found.named(router, response.routers):
        with suppress(RyzansteinError):
            found.answered(address, (yield Call(address, unary, ASK_S)).routers)


def models() -> Unary[list[pb.Model]]:
    return Unary(
        inference_pb2_grpc.InferenceServiceStub, "ListModels", pb.ListModelsRequest(), lambda response: list(response.models)
    )


def count_tokens(messages: Messages, model: str) -> Unary[int]:
    request = pb.CountTokensRequest(model=model, messages=pb.Messages(messages=messages_of(messages)))
    return Unary(inference_pb2_grpc.InferenceServiceStub, "CountTokens", request, lambda response: int(response.tokens))


def embed(texts: Sequence[str], model: str, dimensions: int | None) -> Unary[list[Sequence[float]]]:
    inputs = [embedding_pb2.EmbedInput(text=text) for text in texts]
    request = embedding_pb2.EmbedRequest(model=model, inputs=inputs, dimensions=dimensions)
    return Unary(
        embedding_pb2_grpc.EmbeddingServiceStub,
        "Embed",
        request,
        lambda response: [each.values for each in response.embeddings],
    )


def create_session(session: str, messages: Messages, model: str) -> Unary[SessionView]:
    request = pb.CreateSessionRequest(session_id=session or new_session_id(), model=model, messages=messages_of(messages))
    return Unary(
        inference_pb2_grpc.SessionServiceStub, "CreateSession", request, lambda response: SessionView.of(response.session)
    )


def get_session(session: str) -> Unary[SessionView]:
    request = pb.GetSessionRequest(session_id=session)
    return Unary(
        inference_pb2_grpc.SessionServiceStub, "GetSession", request, lambda response: SessionView.of(response.session)
    )


def delete_session(session: str) -> Unary[None]:
    request = pb.DeleteSessionRequest(session_id=session)
    return Unary(inference_pb2_grpc.SessionServiceStub, "DeleteSession", request, lambda _: None)


def list_sessions(token: str) -> Unary[tuple[list[SessionView], str | None]]:
    """Reads a page of sessions, and the token of the next one; None: there is none."""
    request = pb.ListSessionsRequest(page_size=_PAGE, page_token=token)
    return Unary(
        inference_pb2_grpc.SessionServiceStub,
        "ListSessions",
        request,
        lambda page: (list(map(SessionView.of, page.sessions)), page.next_page_token or None),
    )


class ToolRounds:
    """A conversation in which the assistant calls functions. A call that is asked for by `tool_choice` is asked for once."""

    def __init__(self, messages: Messages, tools: Sequence[Callable[..., Any]], options: Options) -> None:
        self.said: Sequence[pb.Message] = messages_of(messages)
        self.options: Options = {**options, "tools": tools}
        self._functions = {tool.__name__: tool for tool in tools}

    def call(self, call: pb.ToolCall) -> Any:
        """Returns what the function returns: perhaps a coroutine. A failure is text."""
        return call_tool(self._functions, call)

    def returned(self, answer: Answer, returned: Sequence[Any]) -> None:
        """Notes what the functions returned: the next thing to say. A session knows the rest."""
        if "tool_choice" in self.options:
            self.options["tool_choice"] = "auto"  # else it would call in each round, and never answer
        results = [result_of(call, each) for call, each in zip(answer.tool_calls, returned, strict=True)]
        asked = pb.Message(role=pb.ROLE_ASSISTANT, content=answer.text, tool_calls=answer.tool_calls)
        self.said = [*(() if self.options.get("session") else (*self.said, asked)), *results]


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.001, deadline - time.monotonic())
