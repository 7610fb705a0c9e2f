"""The streams of one inference server: one for each sequence that it computes."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Protocol

import structlog
from ryzanstein.worker.engines.remote.asked import AskedChoice, ComputedPart, ComputedToken
from ryzanstein.worker.engines.remote.client import EngineClient
from ryzanstein.worker.engines.remote.faults import EngineBusy, EngineProtocolError, EngineRefused, EngineUnreachable
from ryzanstein.worker.engines.remote.probing import ServedEngine

from ryzanstein import errors
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.tokens import FinishReason
from ryzanstein.worker.engine.plan import SampledToken
from ryzanstein.worker.engine.sequence import Sequence
from ryzanstein.worker.engines.front.front import Front

log = structlog.get_logger(__name__)

_SEEDS = 2**64


class StreamListener(Protocol):
    """Who is told how the server behaves. Called in the loop; must not block."""

    def on_part(self) -> None:
        """Something that counts as progress has arrived."""
        ...

    def on_cut(self, error: EngineUnreachable) -> None:
        """A stream broke off. The server may be gone."""
        ...

    def on_nonsense(self, error: EngineProtocolError) -> None:
        """The server sent what no server of its kind may send: nothing else that it says can be trusted."""
        ...


class EngineStreams:
    """A `SequenceEngine` of a server over HTTP. `front` is set before the first sequence begins."""

    def __init__(self, client: EngineClient, served: ServedEngine, vocab_size: int, listener: StreamListener) -> None:
        self._client, self._served, self._vocab_size, self._listener = client, served, vocab_size, listener
        self._tasks: dict[Sequence, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self.front: Front | None = None

    def begin(self, sequence: Sequence) -> None:
        """See `SequenceEngine.begin`."""
        task = asyncio.create_task(self._run(sequence))
        self._tasks[sequence] = task
        task.add_done_callback(self._on_done)

    def drop(self, sequence: Sequence) -> None:
        """Closes the sequence's connection, which makes the server forget it."""
        if (task := self._tasks.pop(sequence, None)) is not None and not task.done():
            self._ending.add(task)
            task.cancel()

    async def close(self) -> None:
        """Ends all streams; returns when their connections are closed."""
        tasks = [*self._tasks.values(), *self._ending]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("stream of an engine failed", exc_info=error)
            self._listener.on_nonsense(EngineProtocolError(f"a stream could not be read: {error!r}"))

    async def _run(self, sequence: Sequence) -> None:
        front = self.front
        if front is None:
            raise ValueError("there is no front")
        try:
            await self._follow(sequence, front)
        except EngineBusy as error:
            front.failed(sequence, errors.unavailable("ENGINE_BUSY", str(error), error.retry_after_s or 1.0))
        except EngineRefused as error:
            front.failed(sequence, errors.failed_precondition("ENGINE_REFUSED", str(error)))
        except EngineUnreachable as error:
            front.failed(sequence, errors.unavailable("ENGINE_UNREACHABLE", str(error)))
            self._listener.on_cut(error)
        except EngineProtocolError as error:
            self._listener.on_nonsense(error)

    async def _follow(self, sequence: Sequence, front: Front) -> None:
        """Passes the stream of a sequence on, to the end that the server gives it.

        The front drops a sequence after its last token: this is cancelled then.
        """
        asked, dialect = asked_choice(sequence), self._served.dialect
        path, body = dialect.body(asked, self._served)
        num_cached = 0
        async with aclosing(self._client.stream(path, body)) as events:
            async for event in events:
                part = dialect.part(event)
                if part is None:
                    continue
                self._listener.on_part()
                num_cached = part.cached_tokens if part.cached_tokens is not None else num_cached
                if part.prompt_computed is not None:
                    front.computing(sequence, part.prompt_computed)
                for token in part.tokens:
                    front.token(sequence, self._checked(token, asked), num_cached=num_cached)
                if part.finish:
                    self._end(sequence, front, part, asked)
                    return
        raise EngineUnreachable("the stream ended before the answer did")

    def _checked(self, token: ComputedToken, asked: AskedChoice) -> SampledToken:
        if not 0 <= token.token_id < self._vocab_size:
            raise EngineProtocolError(f"token {token.token_id} is outside of the model's vocabulary of {self._vocab_size}")
        if asked.sampling.logprobs is None:
            return SampledToken(token.token_id)
        if token.logprob is None:
            raise EngineProtocolError("a token came without the log probability that was asked for")
        return SampledToken(token.token_id, token.logprob, tuple(token.top[: asked.sampling.logprobs]))

    def _end(self, sequence: Sequence, front: Front, part: ComputedPart, asked: AskedChoice) -> None:
        """Ends a choice that the server says is complete, and that has no last token by our rules.

        Servers that keep the stop token to themselves are given it back: it is a token of the answer.
        """
        if self._tasks.get(sequence) is not asyncio.current_task():
            return  # its last token came in this part
        if part.finish != "stop":
            front.failed(sequence, _ended_early(part.finish, sequence, asked))
            return
        stop = part.stop_token if part.stop_token is not None else _own_stop(sequence)
        if stop is not None:
            front.token(sequence, SampledToken(stop))
        if self._tasks.get(sequence) is asyncio.current_task():
            front.ended(sequence, FinishReason.STOP)


def asked_choice(sequence: Sequence) -> AskedChoice:
    """Returns what a server is asked for a sequence: to go on after its tokens so far, which it takes for a prompt."""
    message, group = sequence.group.message, sequence.group
    sampling = message.sampling
    return AskedChoice(
        token_ids=sequence.tokens(0, sequence.num_tokens),
        num_prompt=group.num_prompt,
        sampling=sampling,
        seed=((sampling.seed or 0) + sequence.choice) % _SEEDS,
        max_tokens=sequence.num_allowed,
        min_tokens=max(0, sampling.min_tokens - len(sequence.generated)),
        stop_token_ids=message.stop_token_ids,
        salt=message.cache_root.hex(),
        request_id=f"{group.id}-{sequence.choice}",
    )


def _own_stop(sequence: Sequence) -> int | None:
    """Returns the model's own end of an answer, which a server does not name."""
    message = sequence.group.message
    own = set(message.stop_token_ids) - set(message.sampling.stop_token_ids)
    return min(own or message.stop_token_ids, default=None)


def _ended_early(finish: str, sequence: Sequence, asked: AskedChoice) -> RyzansteinError:
    num = len(sequence.generated) - (len(asked.token_ids) - asked.num_prompt)
    text = f"the engine ended an answer ({finish[:32]}) after {num} of {asked.max_tokens} tokens"
    return errors.unavailable("ENGINE_ENDED_EARLY", text)
