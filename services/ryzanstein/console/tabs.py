"""One tab: what it asks for, and what it gets.

A tab holds no queue of an answer: it knows which version it has, and gets the rest when its socket takes more. Replies wait
until those before them are sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import structlog
from starlette.websockets import WebSocket, WebSocketDisconnect

from ryzanstein.client import ClientError, clean
from ryzanstein.console.answers.hub import Hub, KeptAnswer, TooManyAnswers, new_session
from ryzanstein.console.answers.questions import Question, calls_of, last_asked
from ryzanstein.console.answers.view import blocks_of
from ryzanstein.console.login import Person
from ryzanstein.console.telemetry import ConsoleTelemetry
from ryzanstein.console.wire import (
    AnswerDetails,
    AskInTab,
    ClusterInTab,
    DeleteInTab,
    DetailsInTab,
    FromTab,
    LeaveInTab,
    ModelRow,
    ModelRows,
    OpenInTab,
    PingInTab,
    Pong,
    Reply,
    RetryInTab,
    SessionList,
    SessionOpened,
    SessionsInTab,
    SessionStale,
    ShownTurn,
    StopInTab,
    VisibleInTab,
    WatchInTab,
    Welcome,
    WrongMessage,
    read,
    written,
)
from ryzanstein.errors import RyzansteinError
from ryzanstein.v1 import inference_pb2 as pb

log = structlog.get_logger(__name__)

FRAME_S = 0.05
UNSENT_BYTES = 256 * 1024
MOST_WATCHED = 64
MOST_CALLS = 8
MOST_TURNS = 400
MOST_TURN_CHARS = 1024 * 1024
_SETTLES = 10
_NOT_KEPT = "the console does not keep this answer any more: open its session again"
_POLICY, _LEFT = 1008, 4401
"""Codes of closed sockets: a message that is none; the person is logged out."""


class Tab:
    """The socket of one tab."""

    def __init__(
        self, socket: WebSocket, person: Person, telemetry: ConsoleTelemetry, welcome: Welcome, used: Callable[[], bool]
    ) -> None:
        self._socket, self._person, self._telemetry, self._used = socket, person, telemetry, used
        self._hub: Hub = person.hub
        self._watched: dict[str, int] = {}
        self._replies: deque[bytes] = deque([written(welcome)])
        self._unsent = 0
        self._room = asyncio.Event()
        self._wake = asyncio.Event()
        self._visible = True
        self._session = ""
        self._cluster_version = -1
        self._watches_cluster = False
        self._calls: set[asyncio.Task[None]] = set()
        self._closing = 0

    async def serve(self) -> None:
        """Serves the tab until it is closed."""
        self._hub.on_turn.append(self._on_turn)
        self._hub.on_gone.append(self._on_gone)
        self._person.leave.append(self._leave_if_out)
        sender = self._telemetry.background.once("tab", self._send_all())
        self._wake.set()
        try:
            await self._receive()
        finally:
            self._hub.on_turn.remove(self._on_turn)
            self._hub.on_gone.remove(self._on_gone)
            self._person.leave.remove(self._leave_if_out)
            self._person.watch.remove(self)
            for answer in list(self._watched):
                self._unwatch(answer)
            for call in list(self._calls):
                call.cancel()
            sender.cancel()
            await asyncio.gather(sender, *self._calls, return_exceptions=True)

    async def _receive(self) -> None:
        while True:
            try:
                message = read(await self._socket.receive_text())
            except (WebSocketDisconnect, KeyError):  # KeyError: bytes in place of a text
                return
            except WrongMessage as error:
                self._telemetry.refusals.labels("message").inc()
                self._say(Reply(0, f"the console did not understand the page: {error}"))
                continue
            if isinstance(message, PingInTab):  # the page does this, and no person
                self._say(Pong())
                continue
            if not self._used():
                self._leave_if_out()
                return
            if isinstance(message, VisibleInTab | WatchInTab | ClusterInTab | LeaveInTab):
                self._note(message)
            elif len(self._calls) >= MOST_CALLS:
                self._say(Reply(message.call, "the page asks for too much at once"))
            else:
                call = self._telemetry.background.once("call", self._do(message))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)

    def _note(self, message: VisibleInTab | WatchInTab | ClusterInTab | LeaveInTab) -> None:
        match message:
            case VisibleInTab():
                self._visible = message.visible
                self._wake.set()
            case WatchInTab():
                self._watch(message.answer, message.version)
            case LeaveInTab():
                self._show("")
            case ClusterInTab():
                self._watches_cluster = message.watched
                if message.watched:
                    self._cluster_version = -1
                    self._person.watch.add(self, self._wake.set)
                else:
                    self._person.watch.remove(self)

    async def _do(self, message: FromTab) -> None:
        """Does what takes time, and says how it ended."""
        reply = Reply(message.call)
        try:
            match message:
                case AskInTab():
                    question = Question(message.text, tuple(message.results))
                    kept = self._hub.ask(message.session or new_session(), question, message.sampling)
                    reply.session, reply.answer = kept.session, kept.sheet.answer_id
                case RetryInTab():
                    kept = await self._hub.retry(message.session, message.sampling)
                    reply.session, reply.answer = kept.session, kept.sheet.answer_id
                case StopInTab():
                    await self._hub.stop(message.answer)
                case OpenInTab():
                    await self._open(message)
                case DeleteInTab():
                    await self._hub.delete(message.session)
                case _:
                    self._say(await self._told(message))
        except (RyzansteinError, TooManyAnswers, ValueError) as error:
            reply.error = clean(error.message if isinstance(error, RyzansteinError) else str(error))[:2000]
        self._say(reply)

    async def _told(self, message: FromTab) -> SessionList | ModelRows | AnswerDetails:
        """Returns what a tab asks to know. Raises ClientError, and ValueError for an answer that is not kept."""
        match message:
            case SessionsInTab():
                return await self._hub.sessions()
            case DetailsInTab():
                return self._details(message)
        models = await self._hub.client.models()
        return ModelRows([ModelRow(clean(each.name), each.context_length, each.ready_nodes) for each in models])

    def _details(self, message: DetailsInTab) -> AnswerDetails:
        """Raises ValueError for an answer that is not kept."""
        kept = self._hub.answers.get(message.answer)
        if kept is None:
            raise ValueError(_NOT_KEPT)
        sheet = kept.sheet
        made = AnswerDetails(
            sheet.answer_id, message.call, kept.session, clean(kept.question.shown)[:200], sheet.status, sheet.asked_at
        )
        made.generation, made.model, made.prompt_tokens = sheet.generation_id, clean(sheet.model), sheet.prompt_tokens
        made.parts, made.timeline, made.resumed = sheet.parts, sheet.timeline.samples, kept.resumed
        made.note, made.figures = sheet.note, sheet.figures
        return made

    async def _open(self, message: OpenInTab) -> None:
        """Shows a session: what the cluster has of it, with the answers that are kept here in colour."""
        session = message.session
        kept = self._hub.of_session(session)
        note = ""
        try:
            messages = list((await self._hub.client.sessions.get(session)).messages)
        except ClientError as error:
            messages = []
            note = "" if kept else clean(error.message)
            if not kept:
                raise
        await _settled(messages, kept)
        self._show(session)
        if len(messages) > MOST_TURNS:
            messages, note = messages[-MOST_TURNS:], "earlier messages are not shown"
        if sum(len(each.content) for each in messages) > MOST_TURN_CHARS:
            note = "the conversation is shown up to a million characters; the cluster has all of it"
        self._say(SessionOpened(session, message.call, note))
        left = MOST_TURN_CHARS
        for each in messages:
            left -= await self._turn(session, each, kept, left)
        for answer in kept:  # runs, or failed: the cluster does not have it
            self._say(_asked_turn(answer))
            self._say(ShownTurn(session, role="assistant", answer=answer.sheet.answer_id))
            await self._has_room()

    async def _turn(self, session: str, message: pb.Message, kept: list[KeptAnswer], left: int) -> int:
        """Says one message of a session, and returns its characters. Takes its answer out of those that are kept."""
        await self._has_room()
        if message.role == pb.ROLE_ASSISTANT:
            for answer in kept:
                if answer.sheet.says(message.content):
                    kept.remove(answer)
                    self._say(ShownTurn(session, role="assistant", answer=answer.sheet.answer_id))
                    return 0
            blocks: list[msgspec.Raw] = []
            coming = blocks_of(message.content[: max(0, left)])
            while (some := await asyncio.to_thread(next, coming, None)) is not None:
                blocks += map(msgspec.Raw, some)
            self._say(ShownTurn(session, role="assistant", blocks=blocks, asked=calls_of(message.tool_calls)))
        else:
            role = pb.Role.Name(message.role).removeprefix("ROLE_").lower()
            self._say(ShownTurn(session, clean(message.content[: max(0, left)]), role))
        return len(message.content)

    def _show(self, session: str) -> None:
        for answer in list(self._watched):
            self._unwatch(answer)
        self._session = session

    def _on_turn(self, kept: KeptAnswer) -> None:
        """Tells the tab of a new question in the session that it shows."""
        if kept.session == self._session:
            self._say(_asked_turn(kept))
            self._say(ShownTurn(kept.session, role="assistant", answer=kept.sheet.answer_id))

    def _on_gone(self, kept: KeptAnswer) -> None:
        """Tells the tab that the session it shows is to be opened again."""
        self._unwatch(kept.sheet.answer_id)
        if kept.session == self._session:
            self._say(SessionStale(kept.session))

    def _watch(self, answer: str, version: int) -> None:
        kept = self._hub.answers.get(answer)
        if kept is None:
            self._say(Reply(0, _NOT_KEPT))
            return
        while len(self._watched) >= MOST_WATCHED:
            self._unwatch(next(iter(self._watched)))
        self._watched[answer] = version
        kept.watchers[self] = self._wake.set
        kept.changed.set()
        self._wake.set()

    def _unwatch(self, answer: str) -> None:
        self._watched.pop(answer, None)
        if (kept := self._hub.answers.get(answer)) is not None:
            kept.watchers.pop(self, None)

    def _leave_if_out(self) -> None:
        """Closes the tab if its login is over."""
        if not self._used():
            self._closing = _LEFT
            self._wake.set()

    def _say(self, message: Any) -> None:
        content = written(message)
        if self._unsent > 4 * UNSENT_BYTES:  # nothing that waits for room finds so much before it
            self._closing = _POLICY
        self._replies.append(content)
        self._unsent += len(content)
        self._wake.set()

    async def _has_room(self) -> None:
        while self._unsent > UNSENT_BYTES:
            self._room.clear()
            await self._room.wait()

    async def _send_all(self) -> None:
        """Sends what there is, at most once in FRAME_S, as fast as the tab takes it."""
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):  # the tab has gone: `_receive` ends too
            while not self._closing:
                await self._wake.wait()
                self._wake.clear()
                while self._replies:
                    content = self._replies.popleft()
                    await self._send(content)
                    self._unsent = max(0, self._unsent - len(content))
                    self._room.set()
                if self._visible:
                    await self._send_answers()
                await self._send_cluster()
                await asyncio.sleep(FRAME_S)
            await self._socket.close(self._closing)

    async def _send_answers(self) -> None:
        for answer in list(self._watched):
            more = True
            while more and answer in self._watched and (kept := self._hub.answers.get(answer)) is not None:
                frame = kept.sheet.frame(self._watched[answer])
                if frame is None:
                    break
                self._watched[answer], more = frame.version, frame.more
                self._telemetry.frames.inc()
                await self._send(written(frame))

    async def _send_cluster(self) -> None:
        watch = self._person.watch
        if self._watches_cluster and watch.latest and watch.version != self._cluster_version:
            if self._cluster_version < 0:
                await self._send(watch.history())
            self._cluster_version = watch.version
            await self._send(watch.latest)

    async def _send(self, content: bytes) -> None:
        """Sends a message. What waits longer than a frame is a tab that is slow."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self._socket.send_text(content.decode())
        if loop.time() - began > FRAME_S:
            self._telemetry.late_frames.inc()


def _asked_turn(kept: KeptAnswer) -> ShownTurn:
    return ShownTurn(kept.session, clean(kept.question.shown), kept.question.role)


async def _settled(messages: Sequence[pb.Message], kept: Sequence[KeptAnswer]) -> None:
    """Waits until the reader of the last answer has its end, where the cluster seems to have it already."""
    if kept and messages and kept[-1].question.says(last_asked(messages)[1]) and messages[-1].role == pb.ROLE_ASSISTANT:
        for _ in range(_SETTLES):
            if kept[-1].sheet.over:
                return
            await asyncio.sleep(FRAME_S)
