"""What a drain does with the pages of recent conversations: it sends them to the nodes that would go on with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from ryzanstein.worker.agent.pages.conversations import Chain
from ryzanstein.worker.agent.pages.outbox import Outbox

_NODES = 4  # at once
_RECONNECT_S = 1.1  # a channel that lost its connection tries again after a second at most

Send = Callable[[Chain], Outbox | None]
"""Queues a chain; returns the queue, or None when there is nothing to send any more."""


async def hand_over(chains: Iterable[Chain], send: Send) -> None:
    """Sends chains in their order, to several nodes at once. Of a node that fails, the rest is left out."""
    by_node: dict[str, list[Chain]] = {}
    for chain in chains:
        if chain.keys:
            by_node.setdefault(chain.place.address, []).append(chain)
    at_once = asyncio.Semaphore(_NODES)
    await asyncio.gather(*(_to_node(at_once, of_one, send) for of_one in by_node.values()))


async def _to_node(at_once: asyncio.Semaphore, chains: Sequence[Chain], send: Send) -> None:
    async with at_once:
        for chain in chains:
            if not await _sent(chain, send):
                return


async def _sent(chain: Chain, send: Send) -> bool:
    """Sends a chain; returns whether the node took it.

    A node that cannot be reached gets a second chance: it may have just restarted.
    """
    for last in (False, True):
        if (outbox := send(chain)) is None:
            return False
        await outbox.empty.wait()
        if not outbox.rests:
            return True
        if last or outbox.failure != "unavailable":
            return False
        await asyncio.sleep(_RECONNECT_S)
        outbox.end_rest()
    return False
