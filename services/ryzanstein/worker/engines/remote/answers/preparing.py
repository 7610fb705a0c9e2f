"""What our sampler in a server must know before a choice with a constraint: the model's tokens, and the grammar, compiled.

It compiles beside its steps; a choice that came at once would hold them up.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import aclosing

from ryzanstein.constraints import Constraint
from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.engine.messages import SubmitGroup
from ryzanstein.worker.engines.asking import READY, WAIT, AskedRow, asked_row, packed, table_name
from ryzanstein.worker.engines.remote.answers.computing import computed
from ryzanstein.worker.engines.remote.asked import AskedChoice
from ryzanstein.worker.engines.remote.dialects.dialect import ServedEngine
from ryzanstein.worker.engines.remote.http.client import EngineClient
from ryzanstein.worker.engines.remote.http.faults import EngineProtocolError, EngineUnreachable

_PROMPT = (1, 2, 3)
_PATIENCE_S = 60.0
_FIRST_S, _MOST_S = 0.01, 0.1
_REMEMBERED = 1024


class Preparations:
    """What one server's sampler has prepared. `moved` is called whenever it has answered."""

    def __init__(self, client: EngineClient, served: ServedEngine, moved: Callable[[], None]) -> None:
        self._client, self._served, self._moved = client, served, moved
        self._table = self._name = b""
        self._learning: asyncio.Task[int] | None = None
        self._prepared: OrderedDict[tuple[Constraint, bytes], None] = OrderedDict()

    def know(self, table: bytes) -> None:
        """Takes the packed table of the model's tokens. It is sent when a constraint first needs it."""
        self._table, self._name = table, table_name(table)

    def forget(self) -> None:
        """Prepares everything again: the server may be another process than before."""
        self._prepared.clear()
        if self._learning is not None and self._learning.done():
            self._learning = None

    async def row(self, message: SubmitGroup, choice: int) -> AskedRow:
        """Returns what to ask for a choice, as soon as the server can begin it without delay. Raises EngineFault."""
        constraint = message.sampling.constraint
        if constraint is None:
            return asked_row(message, choice)
        escape = await self.learned()
        row = asked_row(message, choice, self._name, escape)
        key = constraint, message.cache_root
        if key not in self._prepared:
            await self._until_ready(asked_row(message, choice, row.table, prepares=True))
            self._prepared[key] = None
            if len(self._prepared) > _REMEMBERED:
                self._prepared.popitem(last=False)
        return row

    async def learned(self) -> int:
        """Returns the escape token, which the sampler chooses when it has the table. It is sent once. Raises EngineFault."""
        if self._learning is None or (self._learning.done() and (self._learning.cancelled() or self._learning.exception())):
            self._learning = asyncio.create_task(self._learn())
        return await asyncio.shield(self._learning)

    async def close(self) -> None:
        """Ends what it waits for."""
        if self._learning is not None:
            self._learning.cancel()
            await asyncio.wait([self._learning])

    async def _learn(self) -> int:
        await self._asked(AskedRow(tokens=self._table, prepares=True))
        answer = await self._until_ready(AskedRow(table=self._name, prepares=True))
        if answer[0] != READY:
            raise EngineProtocolError("the sampler in the engine cannot read the table of tokens")
        return answer[1]

    async def _until_ready(self, row: AskedRow) -> list[int]:
        """Asks again while the answer is WAIT; returns the first other one. A refused grammar fails the choice, not this."""
        ends_s, pause_s = time.monotonic() + _PATIENCE_S, _FIRST_S
        while (answer := await self._asked(row))[0] == WAIT:
            if time.monotonic() > ends_s:
                raise EngineUnreachable(f"its sampler has compiled a constraint for {_PATIENCE_S:.0f} s without an end")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_S)
        return answer

    async def _asked(self, row: AskedRow) -> list[int]:
        asked = AskedChoice(
            _PROMPT, len(_PROMPT), SamplingParams(temperature=0.0), 0, 2, 0, (), request_id="prepare", arguments=packed(row)
        )
        got: list[int] = []
        async with aclosing(computed(self._client, self._served, asked)) as parts:
            async for part in parts:
                self._moved()
                got += [token.token_id for token in part.tokens]
        if len(got) != asked.max_tokens:
            raise EngineProtocolError(f"the sampler in the engine answered with {len(got)} tokens")
        return got
