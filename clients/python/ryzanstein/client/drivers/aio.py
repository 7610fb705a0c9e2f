"""The client for event loops."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
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
from ryzanstein.client.tools import call_tool, failed, result_of
from ryzanstein.client.transport import OPTIONS, Tls
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.statuses import error_of_call
from ryzanstein.v1 import embedding_pb2, embedding_pb2_grpc, inference_pb2_grpc
from ryzanstein.v1 import inference_pb2 as pb

T = TypeVar("T")


class AsyncClient:
    """Asks a cluster, at any of its routers.

    An answer goes on when its stream, its router or its node is lost: at the next index, with no token twice. Channels are
    opened at the first call, and belong to its event loop.
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
        """`routers`: host:port, one or several; `key`: an API key, which is not sent without TLS except to this machine, or
        with `insecure`. See `Bounds` for the times. Raises ValueError for what cannot be used."""
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
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.sessions = AsyncSessions(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes all connections. Answers that are still read fail."""
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()

    async def chat(self, messages: Messages, **options: Unpack[Options]) -> Answer:
        """Returns the answer to a conversation. Raises ClientError, whose `partial` is what had arrived."""
        return await self.stream(messages, **options).finish()

    async def chat_as(self, answer_as: type[T], messages: Messages, **options: Unpack[Options]) -> Parsed[T]:
        """Returns an answer that has the form of a Pydantic model or another type.

        Raises ClientError; Incomplete if the answer was cut.
        """
        options["json_schema"] = schema_of(answer_as)
        answer = await self.chat(messages, **options)
        return Parsed(parsed(answer, answer_as), answer)

    def stream(self, messages: Messages, **options: Unpack[Options]) -> AsyncStream:
        """Returns the answer to a conversation, to be read as it comes."""
        return AsyncStream(self, self._core.chat(messages, options))

    async def complete(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Answer:
        """Returns what follows a text or token ids. Raises ClientError."""
        return await self.stream_complete(prompt, **options).finish()

    def stream_complete(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> AsyncStream:
        """Returns what follows a text or token ids, to be read as it comes."""
        return AsyncStream(self, self._core.complete(prompt, options))

    def attach(self, position: Position, timeout_s: float | None = None) -> AsyncStream:
        """Returns the rest of an answer that another reader began."""
        return AsyncStream(self, self._core.attach(position, timeout_s))

    async def run(
        self,
        messages: Messages,
        tools: Sequence[Callable[..., Any]],
        /,
        *,
        max_rounds: int = 8,
        **options: Unpack[Options],
    ) -> Answer:
        """Returns the answer after it has called these functions as often as it wants to, in `max_rounds` answers at most.

        A function may be a coroutine function. One that fails is a result that the assistant reads, no exception here.
        """
        functions = {tool.__name__: tool for tool in tools}
        said = messages_of(messages)
        options["tools"] = tools
        for _ in range(max_rounds):
            answer = await self.chat(said, **options)
            if answer.finish_reason != "tool_calls":
                break
            asked = pb.Message(role=pb.ROLE_ASSISTANT, content=answer.text, tool_calls=answer.tool_calls)
            results = [result_of(call, await self._returned(functions, call)) for call in answer.tool_calls]
            said = [*(() if options.get("session") else (*said, asked)), *results]
        return answer

    @staticmethod
    async def _returned(functions: dict[str, Callable[..., Any]], call: pb.ToolCall) -> Any:
        returned = call_tool(functions, call)
        if not asyncio.iscoroutine(returned):
            return returned
        try:
            return await returned
        except Exception as error:  # the model reads the failure and can call again
            return failed(error)

    async def embed(self, texts: Sequence[str], *, model: str = "", dimensions: int | None = None) -> list[Sequence[float]]:
        """Returns a vector for each text. Raises ClientError."""
        inputs = [embedding_pb2.EmbedInput(text=text) for text in texts]
        request = embedding_pb2.EmbedRequest(model=model or self._core.model, inputs=inputs, dimensions=dimensions)
        answer = await self.unary(embedding_pb2_grpc.EmbeddingServiceStub, "Embed", request)
        return [each.values for each in answer.embeddings]

    async def models(self) -> list[pb.Model]:
        """Returns the models that the cluster serves. Raises ClientError."""
        stub = inference_pb2_grpc.InferenceServiceStub
        return list((await self.unary(stub, "ListModels", pb.ListModelsRequest())).models)

    async def count_tokens(self, messages: Messages, *, model: str = "") -> int:
        """Returns the tokens of a conversation, with the template. Raises ClientError."""
        said = pb.Messages(messages=messages_of(messages))
        request = pb.CountTokensRequest(model=model or self._core.model, messages=said)
        return int((await self.unary(inference_pb2_grpc.InferenceServiceStub, "CountTokens", request)).tokens)

    def conversation(self, session: str | None = None, /, **options: Unpack[Options]) -> AsyncConversation:
        """Returns a conversation that the cluster keeps; None: a new one."""
        return AsyncConversation(self, session or new_session_id(), **options)

    async def cancel(self, generation_id: str) -> None:
        """Ends a generation, at whatever router it runs. One that has ended is no error. Raises ClientError."""
        request, deadline = pb.CancelGenerationRequest(generation_id=generation_id), time.monotonic() + CANCEL_S
        for tried in range(1, CANCEL_TRIES + 1):
            router = self._core.routers.current(time.monotonic())
            try:
                await self.stub(router).CancelGeneration(
                    request, timeout=max(0.01, deadline - time.monotonic()), metadata=self._core.metadata
                )
                return
            except grpc.aio.AioRpcError as failure:
                error = error_of_call(failure)
                if error.code is Code.NOT_FOUND:
                    return
                if tried == CANCEL_TRIES or time.monotonic() >= deadline:
                    raise errors.Unavailable.of(error) from failure
                self._core.routers.failed(router, time.monotonic(), error.message)

    async def unary(self, stub: Callable[[Any], Any], method: str, request: Any, timeout_s: float | None = None) -> Any:
        """Returns the response to a call that may be repeated. Raises ClientError."""
        bounds = self._core.bounds(timeout_s)
        retries = self._core.retries(bounds)
        while True:
            router = self._core.routers.current(time.monotonic())
            call = getattr(stub(self.channel(router)), method)
            try:
                response = await call(request, timeout=left_s(bounds), metadata=self._core.metadata)
            except grpc.aio.AioRpcError as failure:
                wait_s = retries.failed(error_of_call(failure), router, time.monotonic(), begun=False)
            else:
                retries.heard(router)
                return response
            await asyncio.sleep(wait_s)

    def stub(self, router: str) -> Any:
        return inference_pb2_grpc.InferenceServiceStub(self.channel(router))

    def channel(self, router: str) -> grpc.aio.Channel:
        """Returns the channel to a router. Raises RuntimeError in another event loop, or after a fork."""
        self._core.check_process()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError("this client belongs to another event loop; make one in each")
        if (channel := self._channels.get(router)) is None:
            tls = self._core.tls
            if tls is None:
                channel = grpc.aio.insecure_channel(router, options=OPTIONS)
            else:
                channel = grpc.aio.secure_channel(router, tls.credentials, options=tls.options)
            self._channels[router] = channel
        return channel

    def open(self, step: Begin | Attach, asked: Asked) -> Any:
        """Returns the stream of a step. For `AsyncStream`."""
        return open_stream(self.stub(step.router), step, asked.request, self._core.metadata)


class AsyncStream:
    """An answer as it comes: `async with client.stream(...) as stream: async for event in stream`.

    Leaving the block before the end cancels the generation. `cancel` and `close` may be called from any task of the loop.
    """

    def __init__(self, client: AsyncClient, asked: Asked) -> None:
        self._client, self._asked, self._flow = client, asked, asked.flow
        self._call: Any = None
        self._pending: deque[Event] = deque()
        self._woken = asyncio.Event()
        self._timers: list[asyncio.TimerHandle] = []
        self._cancels = False

    @property
    def generation_id(self) -> str:
        """Returns the id; empty until a node has accepted the request."""
        return self.answer.generation_id

    @property
    def position(self) -> Position:
        """Returns where the answer is, for a reader that goes on from here; see `AsyncClient.attach`."""
        return self._flow.position

    @property
    def answer(self) -> Answer:
        """Returns what has arrived so far."""
        return self._flow.answer

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._pending:
            if self._call is None:
                if not await self._open():
                    raise StopAsyncIteration
            else:
                await self._read()
        return self._pending.popleft()

    async def text(self) -> AsyncIterator[str]:
        """Yields the text of the first choice, piece by piece. Raises ClientError."""
        async for event in self:
            if isinstance(event, Text) and event.choice == 0 and event.text:
                yield event.text

    async def finish(self) -> Answer:
        """Reads to the end and returns the whole answer. Raises ClientError. A task that is cancelled meanwhile cancels the
        generation too."""
        async with self:
            async for _ in self:
                pass
        return self.answer

    async def cancel(self) -> None:
        """Ends the generation. What was generated until then still comes, for two seconds at most.

        Raises ClientError if no router takes the cancellation; the stream ends all the same.
        """
        if self._flow.over or self._cancels:
            return
        self._cancels = True
        self._flow.cancel()
        self._woken.set()
        self._timers.append(asyncio.get_running_loop().call_later(CANCEL_S, self._give_up))
        if self.generation_id:
            await asyncio.shield(self._client.cancel(self.generation_id))

    async def close(self) -> None:
        """Leaves the answer. A generation that has not ended is cancelled. Does not raise ClientError."""
        cancels = not self._flow.over and not self._cancels and bool(self.generation_id)
        self._give_up()
        for timer in self._timers:
            timer.cancel()
        if cancels:
            with suppress(errors.ClientError):  # it ends by itself when nobody comes to read it
                await asyncio.shield(self._client.cancel(self.generation_id))

    async def _open(self) -> bool:
        """Does the next step. Returns False at the end."""
        step = self._flow.next(time.monotonic())
        match step:
            case Done():
                return False
            case Wait(seconds):
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), seconds)
            case _:
                self._call = self._client.open(step, self._asked)
                self._watch()
        return True

    async def _read(self) -> None:
        """Reads one message, and leaves the stream where its end has come."""
        flow = self._flow
        try:
            response = await self._call.read()
            if response is not grpc.aio.EOF:
                self._pending.extend(flow.got(response.event, time.monotonic()))
            else:
                flow.ended(time.monotonic())
                self._leave()
        except grpc.aio.AioRpcError as failure:
            self._lost(error_of_call(failure))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self._lost(RyzansteinError("the stream was left", Code.CANCELLED, ""))
        if not flow.reading:
            self._leave()

    def _lost(self, error: RyzansteinError) -> None:
        if self._flow.reading:
            self._flow.lost(error, time.monotonic())
        self._leave()

    def _leave(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def _give_up(self) -> None:
        self._flow.give_up()
        self._woken.set()
        if self._call is not None:
            self._call.cancel()  # ends the pending read

    def _watch(self) -> None:
        """Looks for a router that fell silent: when it may have, not at each token."""
        call, loop, stall_s = self._call, asyncio.get_running_loop(), self._asked.stall_s

        def look() -> None:
            if self._call is not call:
                return
            silent_s = time.monotonic() - self._flow.heard_at
            if self._flow.may_stall and silent_s >= stall_s:
                self._flow.stalled(time.monotonic())
                call.cancel()
            else:
                self._timers[:] = [loop.call_later(max(0.01, stall_s - silent_s) if self._flow.may_stall else stall_s, look)]

        if self._flow.has_choice and not self._cancels:
            for timer in self._timers:
                timer.cancel()
            self._timers[:] = [loop.call_later(stall_s, look)]


class AsyncSessions:
    """The conversations that the cluster keeps."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def create(self, session: str = "", messages: Messages = (), *, model: str = "") -> SessionView:
        """Makes a session. Raises ClientError; Conflict if the id is taken."""
        session = session or new_session_id()
        request = pb.CreateSessionRequest(session_id=session, model=model, messages=messages_of(messages))
        return SessionView.of((await self._call("CreateSession", request)).session)

    async def get(self, session: str) -> SessionView:
        """Returns a session with its messages. Raises ClientError; NotFound if there is none."""
        return SessionView.of((await self._call("GetSession", pb.GetSessionRequest(session_id=session))).session)

    async def list(self) -> AsyncIterator[SessionView]:
        """Yields the sessions without their messages, last used first. Raises ClientError."""
        token = ""
        while True:
            page = await self._call("ListSessions", pb.ListSessionsRequest(page_size=1000, page_token=token))
            for session in page.sessions:
                yield SessionView.of(session)
            token = page.next_page_token
            if not token:
                return

    async def delete(self, session: str) -> None:
        """Forgets a session. Raises ClientError; NotFound if there is none."""
        await self._call("DeleteSession", pb.DeleteSessionRequest(session_id=session))

    async def _call(self, method: str, request: Any) -> Any:
        return await self._client.unary(inference_pb2_grpc.SessionServiceStub, method, request)


class AsyncConversation:
    """A conversation that the cluster keeps: only what is new is sent."""

    def __init__(self, client: AsyncClient, session: str, /, **options: Unpack[Options]) -> None:
        self._client, self.session = client, session
        self._options = options

    async def say(self, messages: Messages, **options: Unpack[Options]) -> Answer:
        """Returns the answer. Raises ClientError."""
        return await self.stream(messages, **options).finish()

    def stream(self, messages: Messages, **options: Unpack[Options]) -> AsyncStream:
        """Returns the answer, to be read as it comes."""
        merged: Options = {**self._options, **options, "session": self.session}
        return self._client.stream(messages, **merged)
