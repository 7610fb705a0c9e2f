"""The throughput of a system at a set number of streams, and whose processor time it takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ryzanstein.lab.bench.router.load.connections import StreamLoad, connections, connections_for
from ryzanstein.lab.bench.router.load.percentile import percentile
from ryzanstein.lab.bench.router.scripted.script import Script
from ryzanstein.lab.bench.router.systems import BenchNode, System, cpu_s

OFFERED_TOKENS_PER_S = 64_000
LONG_ANSWER = 256
SHORT_ANSWER = 4
_WARM_UP_S = 0.3
_END_S = 60.0


@dataclass(frozen=True, slots=True)
class Throughput:
    """One window.

    Delays are from a token's generation on the node to its arrival at the client, of the oldest
    token of each message. `problems` are answers that lost, repeated or mixed up a token, or did
    not end.
    """

    requests_per_s: float
    tokens_per_s: float
    messages_per_s: float
    delay_p50_s: float
    delay_p99_s: float
    node_cpu_s_per_token: float
    system_cpu_s_per_token: float
    client_cpu_s_per_token: float
    problems: Sequence[str]

    @classmethod
    def middle(cls, rounds: Sequence[Throughput]) -> Throughput:
        """Returns the median of each figure over the rounds, and the problems of all."""
        names = [name for name in cls.__dataclass_fields__ if name != "problems"]
        figures = {name: median(getattr(one, name) for one in rounds) for name in names}
        return cls(**figures, problems=[problem for one in rounds for problem in one.problems])


async def long_answers(system: System, node: BenchNode, streams: int, seconds: float) -> Throughput:
    """Measures long answers.

    The node offers the same number of tokens per second for any number of streams: more than any
    system here takes.
    """
    return await _measure(system, node, Script(LONG_ANSWER, streams / OFFERED_TOKENS_PER_S), streams, seconds)


async def short_answers(system: System, node: BenchNode, streams: int, seconds: float) -> Throughput:
    return await _measure(system, node, Script(SHORT_ANSWER, 0.001), streams, seconds)


async def _measure(system: System, node: BenchNode, script: Script, streams: int, seconds: float) -> Throughput:
    async with connections(system.port, connections_for(streams), headers=system.headers, tls=system.tls) as opened:
        load = StreamLoad(opened, script)
        load.start(streams)
        await asyncio.sleep(_WARM_UP_S)
        before, cpu_before, begun = load.so_far(), _cpu(system, node), time.monotonic()
        await asyncio.sleep(seconds)
        took_s = time.monotonic() - begun
        cpu = [after - before for after, before in zip(_cpu(system, node), cpu_before, strict=True)]
        count = load.so_far().since(before)
        tally = await load.stop(_END_S)
    tokens = max(1, count.tokens)
    return Throughput(
        count.answers / took_s,
        count.tokens / took_s,
        count.messages / took_s,
        percentile(tally.delays_s, 0.5),
        percentile(tally.delays_s, 0.99),
        cpu[0] / tokens,
        cpu[1] / tokens,
        cpu[2] / tokens,
        tally.problems,
    )


def _cpu(system: System, node: BenchNode) -> tuple[float, float, float]:
    """Returns the processor time so far of the node, the system and this process.

    This process is the load generator.
    """
    return cpu_s(node.process), system.cpu_s(), time.process_time()
