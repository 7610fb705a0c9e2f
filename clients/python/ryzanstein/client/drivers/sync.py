"""The client for threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Self, TypeVar, Unpack

import grpc

from ryzanstein.client import calls, errors
from ryzanstein.client.answer import Answer, Position
from ryzanstein.client.calls import CANCEL_S, Call, Pause, Steps, ToolRounds, Unary
from ryzanstein.client.conversation import Parsed, SessionView, new_session_id
from ryzanstein.client.core import DEFAULT_ROUTER, Asked, ClientCore, Settings, parsed, schema_of
from ryzanstein.client.drivers.alarms import Alarm, Alarms
from ryzanstein.client.events import Event, Text
from ryzanstein.client.following.flow import Attach, Begin, Done, Wait
from ryzanstein.client.following.streaming import FollowedAnswer, open_stream
from ryzanstein.client.requests import Messages, Options
from ryzanstein.client.transport import open_channel
from ryzanstein.statuses import error_of_call
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub

T = TypeVar("T")
_CLOSERS = 16


class Client:
    """Asks a cluster, at any of its routers. Threads may share it.

    An answer goes on when its stream, its router or its node is lost: at the next index, with no token twice.
    """

    def __init__(self, routers: str | Sequence[str] = DEFAULT_ROUTER, **settings: Unpack[Settings]) -> None:
        """`routers`: host:port, one or several. Raises ValueError for what cannot be used."""
        self._core = ClientCore(routers, **settings)
        self._channels: dict[str, grpc.Channel] = {}
        self._lock, self._is_shut = threading.Lock(), False
        self._learner: threading.Thread | None = None
        self.alarms = Alarms()
        self.sessions = Sessions(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all connections; the client cannot be used any more. Answers that have not ended are cancelled, and their
        readers get AnswerCancelled."""
        running = self._core.close()
        if self._core.forked:  # the connections are of the parent
            return
        if running:
            with ThreadPoolExecutor(min(_CLOSERS, len(running))) as closers:
                list(closers.map(self._cancel_quietly, running))
        self.alarms.close()
        with self._lock:
            self._is_shut, channels = True, list(self._channels.values())
        for channel in channels:
            channel.close()
        if self._learner is not None:
            self._learner.join()

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
        rounds = ToolRounds(messages, tools, options)
        for _ in range(max_rounds):
            answer = self.chat(rounds.said, **rounds.options)
            if answer.finish_reason != "tool_calls":
                break
            rounds.returned(answer, [rounds.call(call) for call in answer.tool_calls])
        return answer

    def embed(self, texts: Sequence[str], *, model: str = "", dimensions: int | None = None) -> list[Sequence[float]]:
        """Returns a vector for each text. Raises ClientError."""
        return self.unary(calls.embed(texts, model or self._core.model, dimensions))

    def models(self) -> list[pb.Model]:
        """Returns the models that the cluster serves. Raises ClientError."""
        return self.unary(calls.models())

    def count_tokens(self, messages: Messages, *, model: str = "") -> int:
        """Returns the tokens of a conversation, with the template. Raises ClientError."""
        return self.unary(calls.count_tokens(messages, model or self._core.model))

    def conversation(self, session: str | None = None, /, **options: Unpack[Options]) -> Conversation:
        """Returns a conversation that the cluster keeps; None: a new one."""
        return Conversation(self, session or new_session_id(), **options)

    def cancel(self, generation_id: str) -> None:
        """Ends a generation, at whatever router it runs. One that has ended is no error. Raises ClientError."""
        self._core.check_usable()
        self._do(self._core.cancelling(generation_id))

    def unary(self, unary: Unary[T]) -> T:
        """Returns the response to a call that may be repeated. Raises ClientError."""
        response = self._do(self._core.repeated(unary))
        self.learn()
        return response

    def open(self, step: Begin | Attach, stream: Stream) -> Any:
        """Returns the call of a step of a stream.

        Raises RuntimeError as all calls: for a closed client, inside an event loop, and after a fork.
        """
        self._core.follows(stream)
        stub = InferenceServiceStub(self._channel(step.router))
        try:
            return open_stream(stub, step, stream.request, self._core.metadata)
        except ValueError:  # another thread has closed the channel
            self._core.check_usable()
            raise

    def learn(self) -> None:
        """Asks a router for the other ones, where it is the time, in a thread of its own."""
        if (steps := self._core.learns()) is not None:
            self._learner = threading.Thread(target=self._learn, args=(steps,), name="ryzanstein-routers", daemon=True)
            self._learner.start()

    def _learn(self, steps: Steps[None]) -> None:
        with suppress(RuntimeError):  # the client was closed
            self._do(steps)
        with self._lock:
            unused = [self._channels.pop(address) for address in self._core.unused(self._channels)]
        for channel in unused:
            channel.close()

    def _cancel_quietly(self, generation_id: str) -> None:
        with suppress(errors.ClientError):  # it ends by itself when nobody comes to read it
            self._do(self._core.cancelling(generation_id))

    def _do(self, steps: Steps[T]) -> T:
        act: Callable[[], Call | Pause] = partial(next, steps)
        while True:
            try:
                step = act()
            except StopIteration as done:
                returned: T = done.value
                return returned
            act = self._done(steps, step)

    def _done(self, steps: Steps[Any], step: Call | Pause) -> Callable[[], Call | Pause]:
        """Does a step. Returns how the next one is had."""
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return partial(next, steps)
        call = getattr(step.unary.stub(self._channel(step.router)), step.unary.method)
        try:
            return partial(steps.send, call(step.unary.request, timeout=step.timeout_s, metadata=self._core.metadata))
        except grpc.RpcError as failure:
            return partial(steps.throw, error_of_call(failure))
        except ValueError:  # another thread has closed the channel
            self._core.check_usable()
            raise

    def _channel(self, router: str) -> grpc.Channel:
        if _in_event_loop():
            raise RuntimeError("this client would block the event loop; use AsyncClient")
        with self._lock:
            if self._is_shut:
                self._core.check_usable()
            if (channel := self._channels.get(router)) is None:
                channel = self._channels[router] = open_channel(grpc, router, self._core.tls)
            return channel


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Stream(FollowedAnswer):
    """An answer as it comes: `with client.stream(...) as stream: for event in stream`.

    Leaving the block before the end cancels the generation. One thread reads; `cancel` and `close` may be called from any.
    """

    def __init__(self, client: Client, asked: Asked) -> None:
        super().__init__(*asked)
        self._client = client
        self._woken = threading.Event()
        self._looks: Alarm | None = None
        self._gives_up: Alarm | None = None

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
        if not self._cancelled():
            return
        self._gives_up = self._client.alarms.after(CANCEL_S, self._give_up)
        if self.generation_id:
            self._client.cancel(self.generation_id)

    def close(self) -> None:
        """Leaves the answer. A generation that has not ended is cancelled. Does not raise ClientError."""
        cancels = self._ends_early()
        self._give_up()
        for alarm in filter(None, (self._looks, self._gives_up)):
            alarm.cancel()
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
                self._reads(self._client.open(step, self))
        return True

    def _read(self) -> None:
        """Reads one message, and leaves the stream where its end has come."""
        try:
            self._took(next(self._call, None))
        except grpc.RpcError as failure:
            self._lost(error_of_call(failure))
        if not self._flow.reading:
            self._leave()

    def _watch(self, number: int) -> None:
        self._client.learn()
        if (seconds := self._look(number)) is not None:
            if self._looks is not None:
                self._looks.cancel()
            self._looks = self._client.alarms.after(seconds, self._watching(number))

    def _wake(self) -> None:
        self._woken.set()


class Sessions:
    """The conversations that the cluster keeps."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def create(self, session: str = "", messages: Messages = (), *, model: str = "") -> SessionView:
        """Makes a session. Raises ClientError; Conflict if the id is taken."""
        return self._client.unary(calls.create_session(session, messages, model))

    def get(self, session: str) -> SessionView:
        """Returns a session with its messages. Raises ClientError; NotFound if there is none."""
        return self._client.unary(calls.get_session(session))

    def list(self) -> Iterator[SessionView]:
        """Yields the sessions without their messages, last used first. Raises ClientError."""
        token: str | None = ""
        while token is not None:
            views, token = self._client.unary(calls.list_sessions(token))
            yield from views

    def delete(self, session: str) -> None:
        """Forgets a session. Raises ClientError; NotFound if there is none."""
        self._client.unary(calls.delete_session(session))


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
