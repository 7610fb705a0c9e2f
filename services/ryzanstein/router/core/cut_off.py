"""Ends generations without readers, and keeps what was shown of their answers in their sessions.

A generation is cut off after it has stopped running and before it is settled. A reader that
attaches in between gets its end when the turn is stored. Knows no nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from ryzanstein.process.background import Background
from ryzanstein.router.generations.generation import Generation
from ryzanstein.router.generations.recorder import Recorder
from ryzanstein.router.sessions.turn import Turn


class CutOffs:
    """The generations that are being cut off.

    `on_end` is called with each generation when its turn is stored or left out and its claim is
    given back. The second argument is True when another router has taken the generation over.
    """

    def __init__(self, recorder: Recorder, background: Background, on_end: Callable[[Generation, bool], None]) -> None:
        self._recorder = recorder
        self._background = background
        self._on_end = on_end
        self._ending: dict[Generation, asyncio.Task[None]] = {}
        self._moved: set[Generation] = set()

    def __contains__(self, generation: Generation) -> bool:
        return generation in self._ending

    def begin(self, generation: Generation, turn: Turn | None, *, keep: bool) -> None:
        """Ends the generation's choices as CANCELLED, and stores its turn in the background.

        With `keep` its session gets what was shown of the first choice, if anything was.
        """
        for choice in generation.log.cancel():
            generation.end_choice(choice)
        task = self._background.once("cut_off", self._end(generation, turn, keep))
        self._ending[generation] = task
        task.add_done_callback(partial(self._ended, generation, turn))

    def moved(self, generation: Generation) -> None:
        """Stops storing the turn of a generation that another router has taken over."""
        if (task := self._ending.get(generation)) is not None:
            self._moved.add(generation)
            task.cancel()

    async def wait(self, generation: Generation) -> None:
        """Returns when the generation's cut-off has ended. Cancelling the wait does not stop it."""
        if (task := self._ending.get(generation)) is not None:
            await asyncio.wait({task})

    async def close(self) -> None:
        """Waits for turns that are being stored.

        That takes no longer than the time limits of the journal and the session store.
        """
        await asyncio.gather(*self._ending.values(), return_exceptions=True)

    async def _end(self, generation: Generation, turn: Turn | None, keep: bool) -> None:
        # After a long pause, this is the latest point at which the router learns that another
        # router took over.
        await self._recorder.flushed(generation)
        if turn is not None and keep:
            await _keep_delivered(generation, turn)

    def _ended(self, generation: Generation, turn: Turn | None, task: asyncio.Task[None]) -> None:
        del self._ending[generation]
        if turn is not None:
            turn.release()
        moved = generation in self._moved
        self._moved.discard(generation)
        self._on_end(generation, moved)


async def _keep_delivered(generation: Generation, turn: Turn) -> None:
    answer, visible = generation.log.choices[0], generation.num_delivered
    message = await generation.message(visible)
    if message.num_chars:
        node_id = next(node_id for first, node_id in reversed(answer.nodes) if first < visible)
        await turn.commit_cut_off(message, generation.request, node_id)
