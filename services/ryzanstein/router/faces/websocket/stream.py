"""One generation on a socket: it is submitted or attached to, and read as far as the client lets it.

A client may stop reading for a while. A reader that takes nothing is no reader: the core pauses the
generation as if the client were away, and the next event is read anew from where this reading stands.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import Enum

from ryzanstein import errors
from ryzanstein.generation.request import GenerationRequest
from ryzanstein.generation.tokens import GenerationEvent, Started
from ryzanstein.router.core.core import Core
from ryzanstein.router.core.peers import PassedReader
from ryzanstein.router.faces.answer import read_start
from ryzanstein.router.faces.disconnect import Departing, OnDisconnect
from ryzanstein.router.faces.http.generate import bare_id, first_wanted
from ryzanstein.router.faces.openai.answers.chunks import Chunk, Chunks
from ryzanstein.router.faces.openai.answers.cursor import Cursor
from ryzanstein.router.faces.openai.answers.dialect import AnswerForm
from ryzanstein.router.faces.websocket.connection import WebSocketConnection
from ryzanstein.router.faces.websocket.frames import Accepted, ChunkFrame, Done, StartedFrame, encoded
from ryzanstein.router.faces.websocket.limits import Credit, SocketLimits


class Reading:
    """The events of one generation, each once, from these indices on."""

    def __init__(self, core: Core, generation_id: str, from_index: Mapping[int, int], tenant: str = "") -> None:
        self._core = core
        self._generation_id, self._tenant = generation_id, tenant
        self._reader = PassedReader(from_index)
        self._events: AsyncGenerator[GenerationEvent, None] | None = None

    async def start(self) -> Started:
        """Begins to read. Raises NOT_FOUND, or the generation's error when it failed."""
        self._events = self._follow()
        started = await read_start(self._events)
        self._reader.wants(started)
        return started

    async def next(self) -> GenerationEvent | None:
        """Returns the next event, or None after the last. Raises the generation's error."""
        if self._events is None:
            self._events = self._follow()
        async for event in self._events:
            if self._reader.wants(event):
                return event
        return None

    async def leave(self) -> None:
        """Stops reading, until the next event is asked for."""
        events, self._events = self._events, None
        if events is not None:
            await events.aclose()

    def _follow(self) -> AsyncGenerator[GenerationEvent, None]:
        return self._core.follow(self._generation_id, self._reader.from_index, tenant=self._tenant)


@dataclass(frozen=True, slots=True)
class Submission:
    """A request that has passed the checks of its form. Within `naming()` errors name the fields of its body."""

    request: GenerationRequest
    form: AnswerForm
    on_disconnect: OnDisconnect
    naming: Callable[[], AbstractContextManager[None]]


class StreamEnd(Enum):
    """Why a stream is cancelled."""

    LEFT = "left"
    """The client disconnected."""
    WITHDRAWN = "withdrawn"
    """The client cancelled it before it was accepted."""
    STOPPED = "stopped"
    """The router stops."""


class SocketStream:
    """The stream with this id. `unread` is called each time its client stops reading."""

    def __init__(
        self,
        *,
        stream_id: str,
        credit: Credit,
        connection: WebSocketConnection,
        core: Core,
        limits: SocketLimits,
        unread: Callable[[], None],
    ) -> None:
        self.id = stream_id
        self.credit = credit
        self.generation = ""
        """The response id, once it is known."""
        self.request_id = ""
        self._connection = connection
        self._core = core
        self._limits = limits
        self._unread = unread
        self.end = StreamEnd.LEFT
        """Set before the stream is cancelled."""

    async def submit(self, submission: Submission) -> None:
        """Runs a generation to its end. Raises its error.

        When the client disconnects, the generation waits for it, ends, or runs on, as the client
        chose.
        """
        request = replace(submission.request, answer_form=submission.form.written)
        departing = Departing.of(request, submission.on_disconnect, can_return=True)
        generation_id = await departing.submit(self._core)
        self.generation = submission.form.dialect.id_prefix + generation_id
        self._connection.write(encoded(Accepted(self.id, self.generation, request.request_id)))
        try:
            await self._follow(generation_id, Cursor(), {}, lambda _: submission.form)
        except asyncio.CancelledError:
            if self.end is StreamEnd.LEFT:
                await departing.left(self._core, generation_id)
            raise

    async def attach(self, response_id: str, cursor: Cursor, include_usage: bool | None, tenant: str) -> None:
        """Reads the rest of a generation, wherever it runs, as its request asked. Raises its error.

        `include_usage` None: also what is said of usage.
        """
        self.generation = response_id

        def form_of(started: Started) -> AnswerForm:
            form = AnswerForm.read(started.answer_form, response_id)
            return form if include_usage is None else replace(form, usage=include_usage)

        generation_id = bare_id(response_id)
        wanted = await first_wanted(self._core, generation_id, cursor, tenant)
        await self._follow(generation_id, cursor, wanted, form_of, tenant)

    async def _follow(
        self,
        generation_id: str,
        cursor: Cursor,
        wanted: dict[int, int],
        form_of: Callable[[Started], AnswerForm],
        tenant: str = "",
    ) -> None:
        reading = Reading(self._core, generation_id, wanted, tenant)
        try:
            started = await reading.start()
            self._connection.write(encoded(StartedFrame(self.id, self.generation, started.model, started.node_id)))
            form = form_of(started)
            chunks = Chunks(started, form.dialect, cursor, form.usage, continuous=form.continuous)
            while (event := await reading.next()) is not None:
                await self._send(chunks.of(event), chunks, reading)
            await self._send(chunks.last(), chunks, reading)
        finally:
            await reading.leave()
        self._connection.write(encoded(Done(self.id, self.generation)))

    async def _send(self, ready: Iterator[Chunk], chunks: Chunks, reading: Reading) -> None:
        for chunk in ready:
            if not self._may_send:
                await self._wait(reading)
            self.credit.spend()
            self._connection.write(encoded(self._framed(chunk, chunks)))

    def _framed(self, chunk: Chunk, chunks: Chunks) -> ChunkFrame:
        if not chunk["choices"]:
            return ChunkFrame(self.id, None, None, False, chunk)
        choice, cursor = chunk["choices"][0]["index"], chunks.cursor
        node = chunks.nodes.get(choice, "")
        return ChunkFrame(self.id, choice, cursor.from_index[choice], cursor.ended(choice), chunk, node)

    @property
    def _may_send(self) -> bool:
        return self.credit.available and self._connection.has_room

    async def _wait(self, reading: Reading) -> None:
        """Returns when the client takes more.

        When it does not soon, the generation is not read until it does. Raises GENERATION_PAUSED
        when it does not at all: the client attaches when it is ready.
        """
        try:
            async with asyncio.timeout(self._limits.unread_s):
                await self._let_send()
            return
        except TimeoutError:
            self._unread()
            await reading.leave()
        try:
            async with asyncio.timeout(self._limits.give_up_s):
                await self._let_send()
        except TimeoutError:
            message = f"no credit for {self._limits.give_up_s:g} s; attach again with credit"
            raise errors.unavailable("GENERATION_PAUSED", message, 0.1) from None

    async def _let_send(self) -> None:
        while not self._may_send:
            await self.credit.wait()
            await self._connection.room()
