"""The client for event loops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self, TypeVar, Unpack

import grpc

from ryzanstein.client import calls, errors
from ryzanstein.client.answer import Answer, Position
from ryzanstein.client.calls import CANCEL_S, Call, Pause, Steps, ToolRounds, Unary
from ryzanstein.client.conversation import Parsed, SessionView, new_session_id
from ryzanstein.client.core import DEFAULT_ROUTER, Asked, ClientCore, Settings, parsed, schema_of
from ryzanstein.client.events import Event, Text
from ryzanstein.client.following.flow import Attach, Begin, Done, Wait
from ryzanstein.client.following.streaming import FollowedAnswer, open_stream
from ryzanstein.client.requests import Messages, Options
from ryzanstein.client.tools import failed
from ryzanstein.client.transport import open_channel
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.statuses import error_of_call
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub

T = TypeVar("T")


class AsyncClient:
    """Asks a cluster, at any of its routers.

    An answer goes on when its stream, its router or its node is lost: at the next index, with no token twice. Channels are
    opened at the first call, and belong to its event loop.
    """

    def __init__(self, routers: str | Sequence[str] = DEFAULT_ROUTER, **settings: Unpack[Settings]) -> None:
        """`routers`: host:port, one or several. Raises ValueError for what cannot be used."""
        self._core = ClientCore(routers, **settings)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_shut = False
        self._learner: asyncio.Task[None] | None = None
        self.sessions = AsyncSessions(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes all connections; the client cannot be used any more. Answers that have not ended are cancelled, and their
        readers get AnswerCancelled."""
        running = self._core.close()
        if self._core.forked:  # the connections are of the parent
            return
        await asyncio.shield(asyncio.gather(*map(self._cancel_quietly, running)))
        self._is_shut = True
        if self._learner is not None:
            self._learner.cancel()
        for channel in self._channels.values():
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
        rounds = ToolRounds(messages, tools, options)
        for _ in range(max_rounds):
            answer = await self.chat(rounds.said, **rounds.options)
            if answer.finish_reason != "tool_calls":
                break
            rounds.returned(answer, [await _awaited(rounds.call(call)) for call in answer.tool_calls])
        return answer

    async def embed(self, texts: Sequence[str], *, model: str = "", dimensions: int | None = None) -> list[Sequence[float]]:
        """Returns a vector for each text. Raises ClientError."""
        return await self.unary(calls.embed(texts, model or self._core.model, dimensions))

    async def models(self) -> list[pb.Model]:
        """Returns the models that the cluster serves. Raises ClientError."""
        return await self.unary(calls.models())

    async def count_tokens(self, messages: Messages, *, model: str = "") -> int:
        """Returns the tokens of a conversation, with the template. Raises ClientError."""
        return await self.unary(calls.count_tokens(messages, model or self._core.model))

    def conversation(self, session: str | None = None, /, **options: Unpack[Options]) -> AsyncConversation:
        """Returns a conversation that the cluster keeps; None: a new one."""
        return AsyncConversation(self, session or new_session_id(), **options)

    async def cancel(self, generation_id: str) -> None:
        """Ends a generation, at whatever router it runs. One that has ended is no error. Raises ClientError."""
        self._core.check_usable()
        await self._do(self._core.cancelling(generation_id))

    async def unary(self, unary: Unary[T]) -> T:
        """Returns the response to a call that may be repeated. Raises ClientError."""
        response = await self._do(self._core.repeated(unary))
        self.learn()
        return response

    def open(self, step: Begin | Attach, stream: AsyncStream) -> Any:
        """Returns the call of a step of a stream.

        Raises RuntimeError as all calls: for a closed client, in another event loop, and after a fork.
        """
        self._core.follows(stream)
        stub: Any = InferenceServiceStub(self._channel(step.router))
        return open_stream(stub, step, stream.request, self._core.metadata)

    def learn(self) -> None:
        """Asks a router for the other ones, where it is the time, in a task of its own."""
        if (steps := self._core.learns()) is not None:
            self._learner = asyncio.create_task(self._learn(steps))

    async def _learn(self, steps: Steps[None]) -> None:
        with suppress(RuntimeError):  # the client was closed
            await self._do(steps)
        for address in self._core.unused(self._channels):
            await self._channels.pop(address).close()

    async def _cancel_quietly(self, generation_id: str) -> None:
        with suppress(errors.ClientError):  # it ends by itself when nobody comes to read it
            await self._do(self._core.cancelling(generation_id))

    async def _do(self, steps: Steps[T]) -> T:
        act: Callable[[], Call | Pause] = partial(next, steps)
        while True:
            try:
                step = act()
            except StopIteration as done:
                returned: T = done.value
                return returned
            act = await self._done(steps, step)

    async def _done(self, steps: Steps[Any], step: Call | Pause) -> Callable[[], Call | Pause]:
        """Does a step. Returns how the next one is had."""
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return partial(next, steps)
        call = getattr(step.unary.stub(self._channel(step.router)), step.unary.method)
        try:
            return partial(steps.send, await call(step.unary.request, timeout=step.timeout_s, metadata=self._core.metadata))
        except grpc.aio.AioRpcError as failure:
            return partial(steps.throw, error_of_call(failure))

    def _channel(self, router: str) -> grpc.aio.Channel:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError("this client belongs to another event loop; make one in each")
        if self._is_shut:
            self._core.check_usable()
        if (channel := self._channels.get(router)) is None:
            channel = self._channels[router] = open_channel(grpc.aio, router, self._core.tls)
        return channel


async def _awaited(returned: Any) -> Any:
    if not asyncio.iscoroutine(returned):
        return returned
    try:
        return await returned
    except Exception as error:  # the model reads the failure and can call again
        return failed(error)


class AsyncStream(FollowedAnswer):
    """An answer as it comes: `async with client.stream(...) as stream: async for event in stream`.

    Leaving the block before the end cancels the generation. `cancel` and `close` may be called from any task of the loop.
    """

    def __init__(self, client: AsyncClient, asked: Asked) -> None:
        super().__init__(*asked)
        self._client = client
        self._woken = asyncio.Event()
        self._looks: asyncio.TimerHandle | None = None
        self._gives_up: asyncio.TimerHandle | None = None

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
        if not self._cancelled():
            return
        self._gives_up = asyncio.get_running_loop().call_later(CANCEL_S, self._give_up)
        if self.generation_id:
            await asyncio.shield(self._client.cancel(self.generation_id))

    async def close(self) -> None:
        """Leaves the answer. A generation that has not ended is cancelled. Does not raise ClientError."""
        cancels = self._ends_early()
        self._give_up()
        for alarm in filter(None, (self._looks, self._gives_up)):
            alarm.cancel()
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
                self._reads(self._client.open(step, self))
        return True

    async def _read(self) -> None:
        """Reads one message, and leaves the stream where its end has come."""
        try:
            response = await self._call.read()
            self._took(None if response is grpc.aio.EOF else response)
        except grpc.aio.AioRpcError as failure:
            self._lost(error_of_call(failure))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self._lost(RyzansteinError("the stream was left", Code.CANCELLED, ""))
        if not self._flow.reading:
            self._leave()

    def _watch(self, number: int) -> None:
        self._client.learn()
        if (seconds := self._look(number)) is not None:
            if self._looks is not None:
                self._looks.cancel()
            self._looks = asyncio.get_running_loop().call_later(seconds, self._watching(number))

    def _wake(self) -> None:
        self._woken.set()


class AsyncSessions:
    """The conversations that the cluster keeps."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def create(self, session: str = "", messages: Messages = (), *, model: str = "") -> SessionView:
        """Makes a session. Raises ClientError; Conflict if the id is taken."""
        return await self._client.unary(calls.create_session(session, messages, model))

    async def get(self, session: str) -> SessionView:
        """Returns a session with its messages. Raises ClientError; NotFound if there is none."""
        return await self._client.unary(calls.get_session(session))

    async def list(self) -> AsyncIterator[SessionView]:
        """Yields the sessions without their messages, last used first. Raises ClientError."""
        token: str | None = ""
        while token is not None:
            views, token = await self._client.unary(calls.list_sessions(token))
            for view in views:
                yield view

    async def delete(self, session: str) -> None:
        """Forgets a session. Raises ClientError; NotFound if there is none."""
        await self._client.unary(calls.delete_session(session))


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
