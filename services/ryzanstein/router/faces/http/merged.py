"""Streams the answers to several prompts as one: their chunks as they come, each choice with a number of its own.

Such a stream is of several generations, so its events have no id, and it cannot be attached to
again. When one prompt fails the stream ends with its error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NamedTuple

from ryzanstein.generation.tokens import Delta, GenerationEvent, Started, Usage
from ryzanstein.replies.reader import ReplyDelta
from ryzanstein.router.faces.http.stream import DONE, error_event
from ryzanstein.router.faces.openai.answers.chunks import Chunk, Chunks, encoded
from ryzanstein.router.faces.openai.answers.cursor import Cursor
from ryzanstein.router.faces.openai.answers.dialect import AnswerForm, usage_body
from ryzanstein.router.faces.openai.answers.failures import HttpFailure

_MAX_AHEAD = 64


class Merged(NamedTuple):
    """An event of the generation of one prompt."""

    prompt: int
    event: GenerationEvent


async def merged(
    readers: Sequence[AsyncGenerator[GenerationEvent, None]], abandon: Callable[[], Awaitable[None]]
) -> AsyncGenerator[Merged, None]:
    """Yields the events of all readers as they come. Raises the first error of any.

    However it ends, the readers are closed. `abandon` is called when it ends before they do.
    """
    events: asyncio.Queue[Merged | Exception | None] = asyncio.Queue(_MAX_AHEAD)

    async def read(prompt: int, reader: AsyncGenerator[GenerationEvent, None]) -> None:
        try:
            async with aclosing(reader):
                async for event in reader:
                    await events.put(Merged(prompt, event))
            await events.put(None)
        except Exception as error:  # raised again in the reader
            await events.put(error)

    reading = [asyncio.create_task(read(prompt, reader)) for prompt, reader in enumerate(readers)]
    left = len(reading)
    try:
        while left:
            match await events.get():
                case None:
                    left -= 1
                case Exception() as error:
                    raise error
                case event:
                    yield event
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        if left:
            await abandon()


class MergedWriter:
    """Frames the chunks of several prompts. `echoed` are the texts that their answers begin with.

    `silent`: nothing follows these texts.
    """

    def __init__(self, form: AnswerForm, num_choices: int, echoed: Sequence[str], *, silent: bool = False) -> None:
        self._form = form
        self._num_choices = num_choices
        self._echoed = echoed
        self._silent = silent
        self._chunks: dict[int, Chunks] = {}
        self._envelope: dict[str, Any] = {}

    def opening(self) -> bytes:
        return b""

    def write(self, merged: Merged) -> bytes:
        prompt, event = merged
        if isinstance(event, Started):
            return self._begin(prompt, event)
        if self._silent and isinstance(event, Delta):
            return b""
        return b"".join(self._framed(prompt, chunk) for chunk in self._chunks[prompt].of(event))

    def close(self) -> bytes:
        usages = [chunks.usage for chunks in self._chunks.values() if chunks.usage is not None]
        if not self._form.usage or not usages:
            return DONE
        total = Usage(*(sum(counts) for counts in zip(*map(_counts, usages), strict=True)))
        if self._silent:
            total = replace(total, completion_tokens=0)
        return _event(self._envelope | {"choices": [], "usage": usage_body(total)}) + DONE

    def failed(self, failure: HttpFailure) -> bytes:
        return error_event(failure)

    def _begin(self, prompt: int, started: Started) -> bytes:
        form = self._form
        chunks = self._chunks[prompt] = Chunks(started, form.dialect, Cursor(), form.usage, continuous=form.continuous)
        self._envelope = self._envelope or chunks.envelope
        if not self._echoed[prompt]:
            return b""
        return b"".join(self._framed(prompt, chunk) for chunk in self._prompt_chunks(chunks, self._echoed[prompt]))

    def _prompt_chunks(self, chunks: Chunks, text: str) -> Iterator[Chunk]:
        for choice in range(self._num_choices):
            yield chunks.envelope | {"choices": [self._form.dialect.delta(choice, ReplyDelta(text), ())]}

    def _framed(self, prompt: int, chunk: Chunk) -> bytes:
        """Returns a chunk of one prompt as one of the whole stream."""
        own = {name: self._envelope[name] for name in ("id", "created")}
        (choice,) = chunk["choices"]
        return _event(chunk | own | {"choices": [choice | {"index": prompt * self._num_choices + choice["index"]}]})


def _counts(usage: Usage) -> tuple[int, ...]:
    return usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens, usage.omitted_prompt_tokens


def _event(chunk: Chunk) -> bytes:
    return f"data: {encoded(chunk)}\n\n".encode()
