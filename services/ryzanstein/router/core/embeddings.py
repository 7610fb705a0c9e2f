"""Vectors of inputs: divides a request into parts, and has nodes compute them.

A vector depends on nothing but the model and its input, so a part that a node loses is computed
again on another one, and nothing is journalled.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ryzanstein import clock, errors
from ryzanstein.embeddings import Embedded, EmbeddingRequest, EmbedInput, check_numbers
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.router.failover.placement import RunnerPolicy
from ryzanstein.router.nodes.calls.embeddings import embed
from ryzanstein.router.nodes.links.link import NodeLink
from ryzanstein.router.nodes.roster import Roster
from ryzanstein.router.telemetry import RouterTelemetry

PART = 32
"""Inputs that one node is asked for at once."""
MAX_RUNNING = 16_384
"""Inputs of all requests of a router at once."""
_AT_ONCE = 8  # parts of one request
_ELSEWHERE = frozenset({Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED, Code.UNIMPLEMENTED, Code.NOT_FOUND})
_INPUT = re.compile(r"input\[([0-9]{1,4})\]")


class Embedder:
    """Has the nodes of a roster make vectors."""

    def __init__(self, links: Roster, policy: RunnerPolicy, telemetry: RouterTelemetry) -> None:
        self._links, self._policy, self._telemetry = links, policy, telemetry
        self._sent: Counter[str] = Counter()
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
        failed: dict[str, RyzansteinError] = {}
        num_failed, until = 0, time.monotonic() + self._policy.failover_wait_s
        while True:
            link = self._links.least_loaded(request.model, failed, self._sent)
            if link is None:
                await self._none_left(request, failed, until)
                continue
            try:
                return await self._asked(link, request, inputs)
            except RyzansteinError as error:
                num_failed += 1
                if error.code not in _ELSEWHERE or num_failed >= self._policy.max_fruitless_attempts:
                    raise _placed(error, begin) from None
                self._telemetry.embeddings.retries.labels(error.code.name.lower()).inc()
                failed[link.node_id] = error

    async def _asked(self, link: NodeLink, request: EmbeddingRequest, inputs: Sequence[EmbedInput]) -> list[Embedded]:
        node_id = link.node_id
        self._sent[node_id] += len(inputs)
        try:
            return await embed(link, request, inputs)
        finally:
            self._sent[node_id] -= len(inputs)
            if not self._sent[node_id]:
                del self._sent[node_id]

    async def _none_left(self, request: EmbeddingRequest, failed: dict[str, RyzansteinError], until: float) -> None:
        """Returns when another node may be tried; those that were lost are tried again then.

        Raises the last error where waiting does not help, or NO_NODES after `failover_wait_s`, or
        DEADLINE_EXCEEDED.
        """
        last = next(reversed(failed.values()), None)
        left_s = until - time.monotonic()
        if last is not None and (last.code is not Code.UNAVAILABLE or left_s <= 0):
            raise last
        if left_s <= 0:
            raise errors.no_nodes(request.model, f"none was available for {self._policy.failover_wait_s:g} s")
        if request.deadline is not None:
            left_s = min(left_s, request.deadline - clock.unix_s())
            if left_s <= 0:
                raise errors.deadline_exceeded()
        await self._links.changed(left_s)
        failed.clear()


def _placed(error: RyzansteinError, begin: int) -> RyzansteinError:
    """Returns the error of a part that begins there: the input that it names is one of the whole request."""
    names = {each.field: _whole_name(each.field, begin) for each in error.violations}
    if not begin or all(names[field] == field for field in names):
        return error
    message, metadata = error.message, dict(error.metadata)
    for field, name in names.items():
        if message.startswith(f"{field}:"):
            message = name + message.removeprefix(field)
    if (field := metadata.get("field", "")) in names:
        metadata["field"] = names[field]
    violations = tuple(replace(each, field=names[each.field]) for each in error.violations)
    return replace(error, message=message, metadata=metadata, violations=violations)


def _whole_name(field: str, begin: int) -> str:
    found = _INPUT.fullmatch(field)
    return field if found is None else f"input[{begin + int(found[1])}]"
