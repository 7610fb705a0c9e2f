"""The answers that one inference server computes: a stream for each sequence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Protocol

import structlog

from ryzanstein import errors
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.tokens import FinishReason
from ryzanstein.worker.engine.plan import SampledToken
from ryzanstein.worker.engine.sequence import Sequence
from ryzanstein.worker.engines.asking import AskedRow, is_constrained, packed
from ryzanstein.worker.engines.front.front import Front
from ryzanstein.worker.engines.remote.answers.computing import computed
from ryzanstein.worker.engines.remote.answers.constrained import EXTRA_TOKENS, constrained
from ryzanstein.worker.engines.remote.answers.preparing import Preparations
from ryzanstein.worker.engines.remote.answers.scoring import prompt_scores
from ryzanstein.worker.engines.remote.asked import AskedChoice, ComputedPart
from ryzanstein.worker.engines.remote.dialects.dialect import ServedEngine
from ryzanstein.worker.engines.remote.http.client import EngineClient
from ryzanstein.worker.engines.remote.http.faults import (
    EngineBusy,
    EngineFault,
    EngineProtocolError,
    EngineRefused,
    EngineUnreachable,
)

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
        self._preparations = Preparations(client, served, listener.on_part)
        self._tasks: dict[Sequence, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self.front: Front | None = None

    def know(self, table: bytes) -> None:
        """Takes the packed table of the model's tokens, before the first choice with a constraint."""
        self._preparations.know(table)

    async def learned(self) -> None:
        """Waits until our sampler in the server has the table: of a large one, it cannot compute meanwhile."""
        if self._served.exact:
            with suppress(EngineFault):  # it is sent again with the first constraint
                await self._preparations.learned()

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
        await asyncio.gather(*tasks, self._preparations.close(), return_exceptions=True)

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
            self._preparations.forget()
            front.failed(sequence, errors.unavailable("ENGINE_UNREACHABLE", str(error)))
            self._listener.on_cut(error)
        except EngineProtocolError as error:
            self._listener.on_nonsense(error)
        except RyzansteinError as error:
            front.failed(sequence, error)

    async def _follow(self, sequence: Sequence, front: Front) -> None:
        """Passes a sequence's tokens on, to the end that the server gives it, or that our rules give it before."""
        if sequence.group.num_scored < sequence.group.num_prompt:
            front.scored(sequence, await prompt_scores(self._client, self._served, sequence))
            self._listener.on_part()
        row = await self._preparations.row(sequence.group.message, sequence.choice) if self._served.exact else None
        asked = asked_choice(sequence, row, self._served.context_length)
        async with aclosing(self._parts(asked, row, sequence.num_allowed)) as parts:
            async for part in parts:
                self._listener.on_part()
                if part.prompt_computed is not None:
                    front.computing(sequence, part.prompt_computed)
                for token in part.tokens:
                    sampled = SampledToken(token.token_id, token.logprob, tuple(token.top))
                    complete = part.finish == "stop" and token is part.tokens[-1]
                    front.token(sequence, sampled, num_cached=part.cached_tokens or 0, complete=complete)
                if sequence not in self._tasks and sequence.end_reason() is None:
                    return  # it was ended before its last token, and the server would go on
                if part.finish == "stop":
                    front.ended(sequence, FinishReason.STOP)
                elif part.finish:
                    front.failed(sequence, _ended_early(part.finish, sequence, asked))

    def _parts(self, asked: AskedChoice, row: AskedRow | None, max_tokens: int) -> AsyncGenerator[ComputedPart, None]:
        parts = computed(self._client, self._served, asked)
        return parts if row is None or not is_constrained(row) else constrained(parts, row.escape, max_tokens)


def asked_choice(sequence: Sequence, row: AskedRow | None = None, context_length: int = 0) -> AskedChoice:
    """Returns what a server is asked for a sequence: to go on after its tokens so far, which it takes for a prompt.

    `row` is what is asked of our sampler, where it runs in the server. It decides alone how a choice with a constraint
    ends, within the context.
    """
    group = sequence.group
    message, sampling = group.message, group.message.sampling
    ends_itself = row is not None and is_constrained(row)
    most = sequence.num_allowed + EXTRA_TOKENS
    return AskedChoice(
        token_ids=sequence.tokens(0, sequence.num_tokens),
        num_prompt=group.num_prompt,
        sampling=sampling,
        seed=((sampling.seed or 0) + sequence.choice) % _SEEDS,
        max_tokens=min(most, context_length - sequence.num_tokens) if ends_itself else sequence.num_allowed,
        min_tokens=max(0, sampling.min_tokens - len(sequence.generated)),
        stop_token_ids=() if ends_itself else message.stop_token_ids,
        salt=message.cache_root.hex(),
        request_id=f"{group.id}-{sequence.choice}",
        arguments=None if row is None else packed(row),
    )


def _ended_early(finish: str, sequence: Sequence, asked: AskedChoice) -> RyzansteinError:
    num = len(sequence.generated) - asked.num_generated
    text = f"the engine ended an answer ({finish[:32]}) after {num} of {asked.max_tokens} tokens"
    return errors.unavailable("ENGINE_ENDED_EARLY", text)
