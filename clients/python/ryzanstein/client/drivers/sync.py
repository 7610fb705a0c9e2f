"""The client for threads that block."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Self, TypeVar, Unpack

import grpc

from ryzanstein.client import errors
from ryzanstein.client.answer import Answer, Position
from ryzanstein.client.conversation import Parsed, SessionView, new_session_id
from ryzanstein.client.core import (
    CANCEL_S,
    CANCEL_TRIES,
    DEFAULT_ROUTER,
    Asked,
    ClientCore,
    left_s,
    open_stream,
    parsed,
    schema_of,
)
from ryzanstein.client.events import Event, Text
from ryzanstein.client.following.flow import Attach, Begin, Done, Wait
from ryzanstein.client.requests import Messages, Options, messages_of
from ryzanstein.client.tools import call_tool, result_of
from ryzanstein.client.transport import OPTIONS, Tls
from ryzanstein.errors import Code
from ryzanstein.statuses import error_of_call
from ryzanstein.v1 import embedding_pb2, embedding_pb2_grpc, inference_pb2_grpc
from ryzanstein.v1 import inference_pb2 as pb

T = TypeVar("T")


class Client:
    """Asks a cluster, at any of its routers. Threads may share it.

    An answer goes on when its stream, its router or its node is lost: at the next index, with no token twice.
    """

    def __init__(
        self,
        routers: str | Sequence[str] = DEFAULT_ROUTER,
        *,
        key: str | None = None,
        tls: Tls | None = None,
        insecure: bool = False,
        model: str = "",
        timeout_s: float | None = None,
        patience_s: float = 30.0,
        busy_wait_s: float = 10.0,
        stall_s: float = 10.0,
    ) -> None:
        """As `AsyncClient`."""
        self._core = ClientCore(
            routers,
            key=key,
            tls=tls,
            insecure=insecure,
            model=model,
            timeout_s=timeout_s,
            patience_s=patience_s,
            busy_wait_s=busy_wait_s,
            stall_s=stall_s,
        )
        self._channels: dict[str, grpc.Channel] = {}
        self._lock = threading.Lock()
        self.sessions = Sessions(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all connections. Answers that are still read fail."""
        with self._lock:
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.close()

    def chat(self, messages: Messages, **options: Unpack[Options]) -> Answer:
        """Returns the answer to a conversation. Raises ClientError, whose `partial` is what had arrived."""
        return self.stream(messages, **options).finish()

    def chat_as(self, answer_as: type[T], messages: Messages, **options: Unpack[Options]) -> Parsed[T]:
        """Returns an answer that has the form of a Pydantic model or another type.

        Raises ClientError; Incomplete if the answer was cut.
        """
        options["json_schema"] = schema_of(answer_as)
        answer = self.chat(messages, **options)
        return Parsed(parsed(answer, answer_as), answer)

    def stream(self, messages: Messages, **options: Unpack[Options]) -> Stream:
        """Returns the answer to a conversation, to be read as it comes."""
        return Stream(self, self._core.chat(messages, options))

    def complete(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Answer:
        """Returns what follows a text or token ids. Raises ClientError."""
        return self.stream_complete(prompt, **options).finish()

    def stream_complete(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Stream:
        """Returns what follows a text or token ids, to be read as it comes."""
        return Stream(self, self._core.complete(prompt, options))

    def attach(self, position: Position, timeout_s: float | None = None) -> Stream:
        """Returns the rest of an answer that another reader began."""
        return Stream(self, self._core.attach(position, timeout_s))

    def run(
        self,
        messages: Messages,
        tools: Sequence[Callable[..., Any]],
        /,
        *,
        max_rounds: int = 8,
        **options: Unpack[Options],
    ) -> Answer:
        """Returns the answer after it has called these functions as often as it wants to, in `max_rounds` answers at most.

        A function that fails is a result that the assistant reads, no exception here.
        """
        functions = {tool.__name__: tool for tool in tools}
        said = messages_of(messages)
        options["tools"] = tools
        for _ in range(max_rounds):
            answer = self.chat(said, **options)
            if answer.finish_reason != "tool_calls":
                break
            asked = pb.Message(role=pb.ROLE_ASSISTANT, content=answer.text, tool_calls=answer.tool_calls)
            results = [result_of(call, call_tool(functions, call)) for call in answer.tool_calls]
            said = [*(() if options.get("session") else (*said, asked)), *results]
        return answer

    def embed(self, texts: Sequence[str], *, model: str = "", dimensions: int | None = None) -> list[Sequence[float]]:
        """Returns a vector for each text. Raises ClientError."""
        inputs = [embedding_pb2.EmbedInput(text=text) for text in texts]
        request = embedding_pb2.EmbedRequest(model=model or self._core.model, inputs=inputs, dimensions=dimensions)
        return [each.values for each in self.unary(embedding_pb2_grpc.EmbeddingServiceStub, "Embed", request).embeddings]

    def models(self) -> list[pb.Model]:
        """Returns the models that the cluster serves. Raises ClientError."""
        stub = inference_pb2_grpc.InferenceServiceStub
        return list(self.unary(stub, "ListModels", pb.ListModelsRequest()).models)

    def count_tokens(self, messages: Messages, *, model: str = "") -> int:
        """Returns the tokens of a conversation, with the template. Raises ClientError."""
        said = pb.Messages(messages=messages_of(messages))
        request = pb.CountTokensRequest(model=model or self._core.model, messages=said)
        return int(self.unary(inference_pb2_grpc.InferenceServiceStub, "CountTokens", request).tokens)

    def conversation(self, session: str | None = None, /, **options: Unpack[Options]) -> Conversation:
        """Returns a conversation that the cluster keeps; None: a new one."""
        return Conversation(self, session or new_session_id(), **options)

    def cancel(self, generation_id: str) -> None:
        """Ends a generation, at whatever router it runs. One that has ended is no error. Raises ClientError."""
        request, deadline = pb.CancelGenerationRequest(generation_id=generation_id), time.monotonic() + CANCEL_S
        for tried in range(1, CANCEL_TRIES + 1):
            router = self._core.routers.current(time.monotonic())
            try:
                self.stub(router).CancelGeneration(
                    request, timeout=max(0.01, deadline - time.monotonic()), metadata=self._core.metadata
                )
                return
            except grpc.RpcError as failure:
                error = error_of_call(failure)
                if error.code is Code.NOT_FOUND:
                    return
                if tried == CANCEL_TRIES or time.monotonic() >= deadline:
                    raise errors.Unavailable.of(error) from failure
                self._core.routers.failed(router, time.monotonic(), error.message)

    def unary(self, stub: Callable[[Any], Any], method: str, request: Any, timeout_s: float | None = None) -> Any:
        """Returns the response to a call that may be repeated. Raises ClientError."""
        bounds = self._core.bounds(timeout_s)
        retries = self._core.retries(bounds)
        while True:
            router = self._core.routers.current(time.monotonic())
            call = getattr(stub(self.channel(router)), method)
            try:
                response = call(request, timeout=left_s(bounds), metadata=self._core.metadata)
            except grpc.RpcError as failure:
                wait_s = retries.failed(error_of_call(failure), router, time.monotonic(), begun=False)
            else:
                retries.heard(router)
                return response
            time.sleep(wait_s)

    def stub(self, router: str) -> Any:
        return inference_pb2_grpc.InferenceServiceStub(self.channel(router))

    def channel(self, router: str) -> grpc.Channel:
        """Returns the channel to a router. Raises RuntimeError inside an event loop, or after a fork."""
        self._core.check_process()
        if _in_event_loop():
            raise RuntimeError("this client would block the event loop; use AsyncClient")
        with self._lock:
            if (channel := self._channels.get(router)) is None:
                tls = self._core.tls
                if tls is None:
                    channel = grpc.insecure_channel(router, options=OPTIONS)
                else:
                    channel = grpc.secure_channel(router, tls.credentials, options=tls.options)
                self._channels[router] = channel
            return channel

    def open(self, step: Begin | Attach, asked: Asked) -> Any:
        """Returns the stream of a step. For `Stream`."""
        return open_stream(self.stub(step.router), step, asked.request, self._core.metadata)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Stream:
    """An answer as it comes: `with client.stream(...) as stream: for event in stream`.

    Leaving the block before the end cancels the generation. One thread reads; `cancel` and `close` may be called from any.
    """

    def __init__(self, client: Client, asked: Asked) -> None:
        self._client, self._asked, self._flow = client, asked, asked.flow
        self._call: Any = None
        self._pending: deque[Event] = deque()
        self._woken = threading.Event()
        self._timers: list[threading.Timer] = []
        self._cancels = False

    @property
    def generation_id(self) -> str:
        """Returns the id; empty until a node has accepted the request."""
        return self.answer.generation_id

    @property
    def position(self) -> Position:
        """Returns where the answer is, for a reader that goes on from here; see `Client.attach`."""
        return self._flow.position

    @property
    def answer(self) -> Answer:
        """Returns what has arrived so far."""
        return self._flow.answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        while not self._pending:
            if self._call is None:
                if not self._open():
                    raise StopIteration
            else:
                self._read()
        return self._pending.popleft()

    def text(self) -> Iterator[str]:
        """Yields the text of the first choice, piece by piece. Raises ClientError."""
        for event in self:
            if isinstance(event, Text) and event.choice == 0 and event.text:
                yield event.text

    def finish(self) -> Answer:
        """Reads to the end and returns the whole answer. Raises ClientError."""
        with self:
            for _ in self:
                pass
        return self.answer

    def cancel(self) -> None:
        """Ends the generation. What was generated until then still comes, for two seconds at most.

        Raises ClientError if no router takes the cancellation; the stream ends all the same.
        """
        if self._flow.over or self._cancels:
            return
        self._cancels = True
        self._flow.cancel()
        self._woken.set()
        self._after(CANCEL_S, self._give_up)
        if self.generation_id:
            self._client.cancel(self.generation_id)

    def close(self) -> None:
        """Leaves the answer. A generation that has not ended is cancelled. Does not raise ClientError."""
        cancels = not self._flow.over and not self._cancels and bool(self.generation_id)
        self._give_up()
        for timer in self._timers:
            timer.cancel()
        if cancels:
            with suppress(errors.ClientError):  # it ends by itself when nobody comes to read it
                self._client.cancel(self.generation_id)

    def _open(self) -> bool:
        """Does the next step. Returns False at the end."""
        step = self._flow.next(time.monotonic())
        match step:
            case Done():
                return False
            case Wait(seconds):
                self._woken.wait(seconds)
            case _:
                self._call = self._client.open(step, self._asked)
                self._watch()
        return True

    def _read(self) -> None:
        """Reads one message, and leaves the stream where its end has come."""
        flow = self._flow
        try:
            response = next(self._call, None)
            if response is not None:
                self._pending.extend(flow.got(response.event, time.monotonic()))
            else:
                flow.ended(time.monotonic())
                self._leave()
        except grpc.RpcError as failure:
            if flow.reading:
                flow.lost(error_of_call(failure), time.monotonic())
            self._leave()
        if not flow.reading:
            self._leave()

    def _leave(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def _give_up(self) -> None:
        self._flow.give_up()
        self._woken.set()
        if (call := self._call) is not None:
            call.cancel()  # ends the pending read

    def _watch(self) -> None:
        """Looks for a router that fell silent: when it may have, not at each token. Only where there is another router."""
        call, stall_s = self._call, self._asked.stall_s

        def look() -> None:
            if self._call is not call or self._flow.over:
                return
            silent_s = time.monotonic() - self._flow.heard_at
            if self._flow.may_stall and silent_s >= stall_s:
                self._flow.stalled(time.monotonic())
                call.cancel()
            else:
                self._after(max(0.01, stall_s - silent_s) if self._flow.may_stall else stall_s, look)

        if self._flow.has_choice and not self._cancels:
            self._after(stall_s, look)

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, act)
        timer.daemon = True
        self._timers = [each for each in self._timers if each.is_alive()]
        self._timers.append(timer)
        timer.start()


class Sessions:
    """The conversations that the cluster keeps."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def create(self, session: str = "", messages: Messages = (), *, model: str = "") -> SessionView:
        """Makes a session. Raises ClientError; Conflict if the id is taken."""
        session = session or new_session_id()
        request = pb.CreateSessionRequest(session_id=session, model=model, messages=messages_of(messages))
        return SessionView.of(self._call("CreateSession", request).session)

    def get(self, session: str) -> SessionView:
        """Returns a session with its messages. Raises ClientError; NotFound if there is none."""
        return SessionView.of(self._call("GetSession", pb.GetSessionRequest(session_id=session)).session)

    def list(self) -> Iterator[SessionView]:
        """Yields the sessions without their messages, last used first. Raises ClientError."""
        token = ""
        while True:
            page = self._call("ListSessions", pb.ListSessionsRequest(page_size=1000, page_token=token))
            yield from map(SessionView.of, page.sessions)
            token = page.next_page_token
            if not token:
                return

    def delete(self, session: str) -> None:
        """Forgets a session. Raises ClientError; NotFound if there is none."""
        self._call("DeleteSession", pb.DeleteSessionRequest(session_id=session))

    def _call(self, method: str, request: Any) -> Any:
        return self._client.unary(inference_pb2_grpc.SessionServiceStub, method, request)


class Conversation:
    """A conversation that the cluster keeps: only what is new is sent."""

    def __init__(self, client: Client, session: str, /, **options: Unpack[Options]) -> None:
        self._client, self.session = client, session
        self._options = options

    def say(self, messages: Messages, **options: Unpack[Options]) -> Answer:
        """Returns the answer. Raises ClientError."""
        return self.stream(messages, **options).finish()

    def stream(self, messages: Messages, **options: Unpack[Options]) -> Stream:
        """Returns the answer, to be read as it comes."""
        merged: Options = {**self._options, **options, "session": self.session}
        return self._client.stream(messages, **merged)
