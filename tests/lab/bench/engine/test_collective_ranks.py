from __future__ import annotations

import psutil
import pytest

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.lab.bench.engine.collectives.messages import RunCollective
from ryzanstein.lab.bench.engine.collectives.ranks import CollectiveRanks
from ryzanstein.worker.ranks.messages import RankSpec


def forked() -> list[psutil.Process]:
    """The ranks: children of the server that the benchmark started."""
    servers = [child for child in psutil.Process().children() if any("collectives.rank" in word for word in child.cmdline())]
    return [rank for server in servers for rank in server.children()]


@pytest.mark.distributed
async def test_a_rank_that_dies_ends_the_measurement_and_all_ranks() -> None:
    async with CollectiveRanks(RankSpec(model="", tp=2, collectives="shm")) as ranks:
        ran = await ranks.run(RunCollective("broadcast", 512, 2, verify=True))
        assert [len(rank.ended_ns) for rank in ran] == [2, 2]
        processes = forked()
        assert len(processes) == 2
        processes[1].kill()
        with pytest.raises(RyzansteinError, match=r"shm: rank [01]: died of SIGKILL") as raised:
            await ranks.run(RunCollective("all_reduce", 512, 2, verify=False))
    assert raised.value.code is Code.FAILED_PRECONDITION
    assert not any(process.is_running() for process in processes)


@pytest.mark.distributed
async def test_a_rank_that_fails_says_why() -> None:
    async with CollectiveRanks(RankSpec(model="", tp=1, collectives="gloo")) as ranks:
        with pytest.raises(RyzansteinError, match="gloo: rank 0: ValueError: unknown collective 'all_to_all'"):
            await ranks.run(RunCollective("all_to_all", 512, 2, verify=True))
