"""The answers that one inference server computes: a stream for each sequence."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Protocol

import structlog

from ryzanstein import errors
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.tokens import FinishReason
from ryzanstein.worker.engine.plan import SampledToken
from ryzanstein.worker.engine.sequence import Sequence
from ryzanstein.worker.engines.asking import asked_row, packed
from ryzanstein.worker.engines.front.front import Front
from ryzanstein.worker.engines.remote.answers.computing import computed
from ryzanstein.worker.engines.remote.asked import AskedChoice
from ryzanstein.worker.engines.remote.dialects.dialect import ServedEngine
from ryzanstein.worker.engines.remote.http.client import EngineClient
from ryzanstein.worker.engines.remote.http.faults import EngineBusy, EngineProtocolError, EngineRefused, EngineUnreachable

log = structlog.get_logger(__name__)

_SEEDS = 2**64


class StreamListener(Protocol):
    """Receives what a server does. Its methods are called in the event loop and must not block."""

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

    def __init__(self, client: EngineClient, served: ServedEngine, listener: StreamListener) -> None:
        self._client, self._served, self._listener = client, served, listener
        self._tasks: dict[Sequence, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self.front: Front | None = None

    def begin(self, sequence: Sequence) -> None:
        """See `SequenceEngine.begin`."""
        if self.front is None:
            raise ValueError("there is no front")
        task = asyncio.create_task(self._run(sequence, self.front))
        self._tasks[sequence] = task
        task.add_done_callback(self._on_done)

    def drop(self, sequence: Sequence) -> None:
        """Closes the sequence's connection, by which the server forgets it, unless the answer is complete."""
        task = self._tasks.pop(sequence, None)
        if task is not None and task is not asyncio.current_task() and not task.done():
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

    async def _run(self, sequence: Sequence, front: Front) -> None:
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
        """Passes a sequence's tokens on, to the end that the server gives it, or that our rules give it before."""
        asked = asked_choice(sequence, exact=self._served.exact)
        async with aclosing(computed(self._client, self._served, asked)) as parts:
            async for part in parts:
                self._listener.on_part()
                if part.prompt_computed is not None:
                    front.computing(sequence, part.prompt_computed)
                for token in part.tokens:
                    sampled = SampledToken(token.token_id, token.logprob, tuple(token.top))
                    front.token(sequence, sampled, num_cached=part.cached_tokens or 0)
                if sequence not in self._tasks and sequence.end_reason() is None:
                    return  # it was ended before its last token, and the server would go on
                if part.finish == "stop":
                    front.ended(sequence, FinishReason.STOP)
                elif part.finish:
                    front.failed(sequence, _ended_early(part.finish, sequence, asked))


def asked_choice(sequence: Sequence, *, exact: bool = False) -> AskedChoice:
    """Returns what a server is asked for a sequence: to go on after its tokens so far, which it takes for a prompt.

    `exact`: our sampler runs in the server, so the whole request is sent to it.
    """
    group = sequence.group
    message, sampling = group.message, group.message.sampling
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
        arguments=packed(asked_row(message, sequence.choice)) if exact else None,
    )


def _ended_early(finish: str, sequence: Sequence, asked: AskedChoice) -> RyzansteinError:
    num = len(sequence.generated) - asked.num_generated
    text = f"the engine ended an answer ({finish[:32]}) after {num} of {asked.max_tokens} tokens"
    return errors.unavailable("ENGINE_ENDED_EARLY", text)
