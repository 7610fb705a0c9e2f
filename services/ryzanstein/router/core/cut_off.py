"""Ends generations that nobody reads, and keeps in their sessions what was shown of their answers.

A generation comes here when it runs no more and before it is settled. Whoever reads it meanwhile gets its end when the turn
is stored. Knows no nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from ryzanstein.background import Background
from ryzanstein.router.generations.generation import Generation
from ryzanstein.router.generations.recorder import Recorder
from ryzanstein.router.sessions.turn import Turn


class CutOffs:
    """`on_end` is called with each generation when its turn is stored or left out, and its claim given back; with True when
    another router has gone on with it."""

    def __init__(self, recorder: Recorder, background: Background, on_end: Callable[[Generation, bool], None]) -> None:
        self._recorder = recorder
        self._background = background
        self._on_end = on_end
        self._ending: dict[Generation, asyncio.Task[None]] = {}
        self._moved: set[Generation] = set()

    def __contains__(self, generation: Generation) -> bool:
        return generation in self._ending

    def begin(self, generation: Generation, turn: Turn | None, *, keep: bool) -> None:
        """Its choices end as CANCELLED. `keep`: its session gets what was shown of the first one, if anything was."""
        for choice in generation.log.cancel():
            generation.end_choice(choice)
        task = self._background.once("cut_off", self._end(generation, turn, keep))
        self._ending[generation] = task
        task.add_done_callback(partial(self._ended, generation, turn))

    def moved(self, generation: Generation) -> None:
        """Another router has it: its turn is not stored by this one."""
        if (task := self._ending.get(generation)) is not None:
            self._moved.add(generation)
            task.cancel()

    async def wait(self, generation: Generation) -> None:
        """Until it has ended."""
        if (task := self._ending.get(generation)) is not None:
            await asyncio.wait({task})

    async def close(self) -> None:
        """Waits for what is being stored, which takes no longer than the journal and the session store are waited for."""
        await asyncio.gather(*self._ending.values(), return_exceptions=True)

    async def _end(self, generation: Generation, turn: Turn | None, keep: bool) -> None:
        # A router that was stopped for a while learns here, at the latest, that another one has gone on.
        await self._recorder.flushed(generation)
        if turn is not None and keep:
            await _keep_shown(generation, turn)

    def _ended(self, generation: Generation, turn: Turn | None, task: asyncio.Task[None]) -> None:
        del self._ending[generation]
        if turn is not None:
            turn.release()
        moved = generation in self._moved
        self._moved.discard(generation)
        self._on_end(generation, moved)


async def _keep_shown(generation: Generation, turn: Turn) -> None:
    answer, shown = generation.log.choices[0], generation.shown
    if text := "".join(token.text for token in answer.tokens[:shown]):
        node_id = next(node_id for first, node_id in reversed(answer.nodes) if first < shown)
        await turn.commit_cut_off(text, generation.request, node_id)
