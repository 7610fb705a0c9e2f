"""One choice, computed by an inference server: its stream, checked token by token.

What a dialect reads from an event is believed only here: every token is one that the server counts, none is missing, and none
is more than was asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace

from ryzanstein.worker.engines.remote.answers.gaps import recomputed, respelled
from ryzanstein.worker.engines.remote.asked import AskedChoice, ComputedPart, ComputedToken
from ryzanstein.worker.engines.remote.dialects.dialect import ServedEngine
from ryzanstein.worker.engines.remote.http.client import EngineClient
from ryzanstein.worker.engines.remote.http.faults import EngineFault, EngineProtocolError, EngineUnreachable

_TAIL_S = 2.0
"""How long a stream may go on after the answer has ended. What comes then are counts."""
_LARGEST_ID = 2**31 - 1


async def computed(client: EngineClient, served: ServedEngine, asked: AskedChoice) -> AsyncGenerator[ComputedPart, None]:
    """Yields the tokens of a choice as they come, and the progress of its prompt. The last part alone has `finish`.

    The token that ends an answer is among the tokens. Raises EngineFault. Close it (`contextlib.aclosing`) to cancel: the
    connection closes, at which the server ends its work.
    """
    answer = _Answer(served, asked)
    while not answer.finish:
        async with aclosing(_streamed(client, answer)) as parts:
            async for part in parts:
                yield part
        if answer.lost:
            part = await recomputed(client, served, answer.rest, answer.lost)
            answer.lost = 0
            yield ComputedPart(answer.add(part.tokens))
            # "length" is that of this request, the answer may go on.
            answer.end("" if part.finish == "length" and answer.room else part.finish)
    yield answer.last


class _Answer:
    """What is known of an answer. `lost` tokens were computed that cannot be told; `finish` is why it ended, "" before."""

    def __init__(self, served: ServedEngine, asked: AskedChoice) -> None:
        self.served, self._asked = served, asked
        self.token_ids: list[int] = []
        self.lost = 0
        self.finish = ""
        self.cached: int | None = None
        self._stop_token: int | None = None
        self._largest = served.vocabulary - 1 if served.vocabulary else _LARGEST_ID
        self._num_top = asked.sampling.logprobs or 0
        self._stops = frozenset(asked.stop_token_ids)

    @property
    def rest(self) -> AskedChoice:
        """What is left to ask for."""
        return self._asked.after(self.token_ids) if self.token_ids else self._asked

    @property
    def room(self) -> int:
        """How many tokens may come."""
        return self._asked.max_tokens - len(self.token_ids)

    @property
    def last(self) -> ComputedPart:
        return ComputedPart(finish=self.finish, stop_token=self._stop_token, cached_tokens=self.cached)

    def add(self, tokens: Sequence[ComputedToken]) -> list[ComputedToken]:
        """Takes further tokens; returns them up to the first that ends the answer. Raises EngineProtocolError."""
        taken: list[ComputedToken] = []
        for token in tokens:
            if not self.room:
                raise EngineProtocolError(f"the engine computed more than {self._asked.max_tokens} tokens")
            self._require_valid(token)
            taken.append(replace(token, top=token.top[: self._num_top]) if len(token.top) > self._num_top else token)
            self.token_ids.append(token.token_id)
            if token.token_id in self._stops and len(self.token_ids) > self._asked.min_tokens:
                self.end("stop", token.token_id)
                break
        return taken

    def end(self, finish: str, stop_token: int | None = None) -> list[ComputedToken]:
        """Ends the answer, unless it has ended. Returns the stop token if the server has cut it off."""
        if self.finish or not finish:
            return []
        self.finish, self._stop_token = finish, stop_token
        if stop_token is None or not self.room or self.token_ids[-1:] == [stop_token]:
            return []
        self.token_ids.append(stop_token)
        return [ComputedToken(stop_token)]

    def _require_valid(self, token: ComputedToken) -> None:
        for token_id in (token.token_id, *(other for other, _ in token.top)):
            if not 0 <= token_id <= self._largest:
                raise EngineProtocolError(f"the engine named the token {token_id}, the largest is {self._largest}")


async def _streamed(client: EngineClient, answer: _Answer) -> AsyncGenerator[ComputedPart, None]:
    """Yields what one stream adds to the answer, until the answer ends or tokens are lost."""
    asked, served = answer.rest, answer.served
    begun = len(answer.token_ids)
    async with aclosing(client.stream(*served.dialect.body(asked, served))) as events:
        async for event in events:
            found = served.dialect.part(event, len(answer.token_ids) - begun)
            if found is None:
                continue
            if found.num_prompt is not None and found.num_prompt != len(asked.token_ids):
                raise EngineProtocolError(f"the engine read a prompt of {found.num_prompt} tokens, not {len(asked.token_ids)}")
            if answer.cached is None and not begun:
                answer.cached = found.cached_tokens
            tokens = answer.add(await _new_tokens(client, answer, found, begun))
            if answer.lost:
                return
            tokens += answer.end(found.finish, found.stop_token)
            if tokens or found.prompt_computed is not None:
                yield ComputedPart(tokens, cached_tokens=answer.cached, prompt_computed=found.prompt_computed)
            if answer.finish:
                await _read_tail(events, answer, begun)
                return
    raise EngineUnreachable(f"{client.address} ended its stream before the end of the answer")


async def _new_tokens(client: EngineClient, answer: _Answer, found: ComputedPart, begun: int) -> Sequence[ComputedToken]:
    """Returns the tokens of an event that are not known yet. Sets `lost` if there are some that cannot be told."""
    if found.num_generated is None:
        return found.tokens
    new = found.num_generated + begun - len(answer.token_ids)
    if new <= len(found.tokens):
        return found.tokens[len(found.tokens) - max(new, 0) :]
    if not answer.served.dialect.loses_ids:
        raise EngineProtocolError(f"the engine counts {new} new tokens and names {len(found.tokens)}")
    if new > answer.room:
        raise EngineProtocolError(f"the engine counts {new} new tokens, {answer.room} were left")
    tokens = await respelled(client, found, new)
    answer.lost = 0 if tokens else new
    return tokens


async def _read_tail(events: AsyncIterator[bytes], answer: _Answer, begun: int) -> None:
    """Reads what follows the end, so that the connection can be used again, unless the server computes on.

    No fault of it matters: the answer is complete.
    """
    seen = len(answer.token_ids) - begun
    try:
        async with asyncio.timeout(_TAIL_S):
            async for event in events:
                found = answer.served.dialect.part(event, seen)
                if found is None:
                    continue
                if found.tokens and (found.num_generated is None or found.num_generated > seen):
                    return
                if answer.cached is None and not begun:
                    answer.cached = found.cached_tokens
    except (EngineFault, TimeoutError):
        return
