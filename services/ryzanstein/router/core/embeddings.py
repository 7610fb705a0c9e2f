"""Vectors of inputs: divides a request into parts, and has nodes compute them.

A vector depends on nothing but the model and its input, so a part that a node loses is computed
again on another one, and nothing is journalled.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial

from ryzanstein import errors
from ryzanstein.embeddings import Embedded, EmbeddingRequest, EmbedInput, check_numbers
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.request import EMBEDDINGS
from ryzanstein.router.core.any_node import AnyNode
from ryzanstein.router.failover.placement import RunnerPolicy
from ryzanstein.router.nodes.calls.texts import embed
from ryzanstein.router.nodes.links.link import NodeLink
from ryzanstein.router.nodes.roster import Roster
from ryzanstein.router.telemetry import RouterTelemetry

PART = 32
"""Inputs that one node is asked for at once."""
PARTS_AT_NODE = 4
"""Parts of all requests that a node has at once; others wait here. A node refuses inputs when 256 sequences wait."""
MAX_RUNNING = 16_384
"""Inputs of all requests of a router at once."""
_AT_ONCE = 8  # parts of one request
# Nodes of earlier versions name them `input[0]`, and all together `input`.
_INPUT = re.compile(r"inputs?\[([0-9]{1,4})\]((?:\.[a-z_]+)?)")


class Embedder:
    """Has the nodes of a roster make vectors."""

    def __init__(self, links: Roster, policy: RunnerPolicy, telemetry: RouterTelemetry) -> None:
        self._links, self._telemetry = links, telemetry
        self._nodes = AnyNode(links, policy)
        self._sent: Counter[str] = Counter()
        self._rooms: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(PARTS_AT_NODE))
        self._num_inputs = 0

    async def embed(self, request: EmbeddingRequest) -> list[Embedded]:
        """Returns the vectors in the order of the inputs. When one part fails, the others are cancelled.

        The first part is computed before the others: what is wrong with all of them shows at once.
        Raises QUEUE_FULL at `MAX_RUNNING` inputs of all requests, whose vectors take memory until the last.
        """
        num_running = self._num_inputs + len(request.inputs)
        if num_running > MAX_RUNNING:
            self._telemetry.refused.labels("embeddings_full").inc()
            raise errors.queue_full(self._num_inputs, MAX_RUNNING)
        self._num_inputs = num_running
        try:
            return await self._embedded(request)
        finally:
            self._num_inputs -= len(request.inputs)

    async def _embedded(self, request: EmbeddingRequest) -> list[Embedded]:
        num_inputs = len(request.inputs)
        embedded = await self._part(request, 0)
        check_numbers(num_inputs, len(embedded[0].values))
        slots = asyncio.Semaphore(_AT_ONCE)

        async def part(begin: int) -> list[Embedded]:
            async with slots:
                return await self._part(request, begin)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(part(begin)) for begin in range(PART, num_inputs, PART)]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        for task in tasks:
            embedded += task.result()
        self._telemetry.embeddings.inputs.labels(request.model).inc(num_inputs)
        self._telemetry.prompts.read(request.model, sum(each.prompt_tokens for each in embedded))
        return embedded

    async def _part(self, request: EmbeddingRequest, begin: int) -> list[Embedded]:
        """Returns the vectors of one part, from the first node that can make them."""
        inputs = request.inputs[begin : begin + PART]

        async def asked(link: NodeLink) -> list[Embedded]:
            if not request.features <= link.features:
                raise errors.nodes_too_old(request.model, request.features)
            if EMBEDDINGS in link.engine.unsupported:
                raise errors.engine_lacks(request.model, EMBEDDINGS, link.engine.name)
            return await self._asked(link, request, inputs)

        try:
            return await self._nodes.ask(request.model, request.deadline, asked, excluding=self._sent, on_retry=self._count)
        except RyzansteinError as error:
            raise error.with_fields(partial(_whole_name, begin)) from None

    def _count(self, error: RyzansteinError) -> None:
        self._telemetry.embeddings.retries.labels(error.code.name.lower()).inc()

    async def _asked(self, link: NodeLink, request: EmbeddingRequest, inputs: Sequence[EmbedInput]) -> list[Embedded]:
        node_id = link.node_id
        self._sent[node_id] += len(inputs)
        try:
            async with self._rooms[node_id]:
                return await self._sent_to(link, request, inputs)
        finally:
            self._sent[node_id] -= len(inputs)
            if not self._sent[node_id]:
                del self._sent[node_id], self._rooms[node_id]

    async def _sent_to(self, link: NodeLink, request: EmbeddingRequest, inputs: Sequence[EmbedInput]) -> list[Embedded]:
        breaker = self._links.breaker(link.node_id)
        if breaker is not None:
            breaker.sent()
        try:
            embedded = await embed(link, request, inputs)
        except BaseException:
            if breaker is not None:
                breaker.withdrawn()
            raise
        if breaker is not None:
            breaker.worked()
        return embedded


def _whole_name(begin: int, field: str) -> str:
    """Returns the name of an input in the whole request, for its name in a part that begins there."""
    if field == "input":
        return "inputs"
    found = _INPUT.fullmatch(field)
    return field if found is None else f"inputs[{begin + int(found[1])}]{found[2]}"
