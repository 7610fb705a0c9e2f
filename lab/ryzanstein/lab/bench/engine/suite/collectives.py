"""The suite's collectives part: two ranks without a model, on separate cores.

It times a few operations and sizes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial

from ryzanstein.lab.bench.engine.collectives.byte_sizes import show_size
from ryzanstein.lab.bench.engine.collectives.messages import ELEMENT_BYTES, RunCollective
from ryzanstein.lab.bench.engine.collectives.ranks import CollectiveRanks
from ryzanstein.lab.bench.engine.collectives.survey import latencies_s
from ryzanstein.lab.bench.engine.suite.rounds import RoundLog, Subject
from ryzanstein.worker.collectives.opening import default_backend
from ryzanstein.worker.ranks.messages import RankSpec

CELLS = (
    ("all_reduce", 8 * 2**10, 1000),
    ("all_reduce", 2**20, 40),
    ("all_gather", 256 * 2**10, 100),
    ("broadcast", 8 * 2**10, 1000),
)
_RANKS = 2


class CollectivesPart:
    """The backend that two ranks on this CPU have by default.

    `cells` are operation, bytes and iterations.
    """

    def __init__(self, cells: Sequence[tuple[str, int, int]] = CELLS) -> None:
        self._backend = default_backend("cpu")
        self._spec = RankSpec(model="", tp=_RANKS, collectives=self._backend, threads=1, pin=True)
        self._cells = cells

    async def round(self, log: RoundLog) -> None:
        async with CollectiveRanks(self._spec) as ranks:
            for op, num_bytes, iterations in self._cells:
                name = f"collectives/{self._backend}/{op}/{show_size(num_bytes).replace(' ', '')}"
                subject = Subject(name, f"the median of {iterations} with {_RANKS} ranks", "small")
                await log.time([subject], partial(_run, ranks, op, num_bytes, iterations))


async def _run(ranks: CollectiveRanks, op: str, num_bytes: int, iterations: int) -> Sequence[float]:
    """Returns the median time, after a tenth as many runs that are not counted."""
    await ranks.run(_request(op, num_bytes, 1 + iterations // 10))
    return (statistics.median(latencies_s(await ranks.run(_request(op, num_bytes, iterations)))),)


def _request(op: str, num_bytes: int, iterations: int) -> RunCollective:
    return RunCollective(op, num_bytes // ELEMENT_BYTES, iterations, verify=False)
