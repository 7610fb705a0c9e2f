"""How long the first token takes when a system has nothing else to do."""

from __future__ import annotations

from ryzanstein.lab.bench.router.load.connections import answer_once, connections
from ryzanstein.lab.bench.router.scripted.script import Script
from ryzanstein.lab.bench.router.systems import System


async def first_tokens_s(system: System, answers: int) -> list[float]:
    """Returns the times to the first token of answers one after another on one connection.

    A time is from the request's last byte written to the first token read. The first few are not
    counted.
    """
    async with connections(system.port, 1, headers=system.headers, tls=system.tls) as (connection,):
        tallies = [await answer_once(connection, Script(tokens=1)) for _ in range(answers + answers // 10)]
    return [tally.first_tokens_s[0] for tally in tallies[answers // 10 :] if tally.first_tokens_s]
