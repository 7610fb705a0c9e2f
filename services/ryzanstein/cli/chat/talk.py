"""The state of a conversation: who is asked, in which session, with which options."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

from ryzanstein.cli import display
from ryzanstein.cli.chat.views import AnswerView
from ryzanstein.client import Answer, AsyncClient, AsyncStream, ClientError
from ryzanstein.client.requests import Options
from ryzanstein.v1 import inference_pb2 as pb


@dataclass(slots=True)
class Talk:
    """A conversation that the cluster keeps. `system` is said before the first message of a session."""

    client: AsyncClient
    session: str
    options: Options
    system: str = ""
    last: Answer | None = None
    _asked: str = field(default="", init=False)
    _stream: AsyncStream | None = field(default=None, init=False)

    async def say(self, text: str, view: AnswerView | None) -> Answer:
        """Returns the answer and shows it as it arrives. Raises ClientError."""
        messages = [pb.Message(role=pb.ROLE_USER, content=text)]
        if self.system:
            messages.insert(0, pb.Message(role=pb.ROLE_SYSTEM, content=self.system))
        self._asked = text
        options: Options = {**self.options, "session": self.session}
        stream = self._stream = self.client.stream(messages, **options)
        self.last = stream.answer
        try:
            async with stream:
                async for event in stream:
                    if view is not None:
                        view.show(event)
        finally:
            self._stream = None
            if view is not None:
                view.end()
        self.system = ""
        return stream.answer

    async def retry(self, view: AnswerView | None) -> Answer:
        """Asks the last question again, in a new session without its last answer. Raises ClientError."""
        before = list((await self.client.sessions.get(self.session)).messages)
        while before and before[-1].role != pb.ROLE_USER:
            before.pop()
        asked = before.pop().content if before else self._asked
        self.new_session()
        if before:
            await self.client.sessions.create(self.session, before, model=self.options.get("model", ""))
        return await self.say(asked, view)

    async def num_tokens(self) -> int:
        """Returns the tokens of the session's messages, with the template. Raises ClientError."""
        session = await self.client.sessions.get(self.session)
        return await self.client.count_tokens(session.messages, model=self.options.get("model", ""))

    def cancel(self) -> bool:
        """Ends the answer that is being read. Returns False if there is none."""
        if self._stream is None:
            return False
        self._cancelling = asyncio.ensure_future(self._cancel(self._stream))
        return True

    def new_session(self, session: str = "") -> None:
        self.session = session or f"chat-{uuid.uuid4().hex[:12]}"

    def set(self, name: str, text: str) -> None:
        """Sets an option of sampling. Raises KeyError for one that does not exist, ValueError for what is no value of it."""
        kind = SETTINGS[name]
        if text in ("", "default"):
            cast(dict[str, object], self.options).pop(name, None)
        else:
            cast(dict[str, object], self.options)[name] = kind(text)

    def figures(self, answer: Answer) -> str:
        """Returns the line below an answer."""
        rate = "" if answer.tokens_per_s is None else f", {answer.tokens_per_s:.0f} tokens/s"
        first = display.milliseconds(answer.time_to_first_token_s)
        again = f", re-attached {answer.reattaches}x" if answer.reattaches else ""
        return f"{' -> '.join(answer.nodes)}: first token {first}{rate}{again}, session {self.session}"

    _cancelling: asyncio.Future[None] | None = field(default=None, init=False)

    @staticmethod
    async def _cancel(stream: AsyncStream) -> None:
        with suppress(ClientError):  # the stream ends all the same
            await stream.cancel()


SETTINGS = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": int,
    "max_tokens": int,
    "timeout_s": float,
}
"""What `/set` sets, and how its value is read."""
