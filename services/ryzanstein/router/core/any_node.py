"""Has any node of a model answer a call: the least loaded, then others. Waits while there is none.

For calls that leave no state on a node, so that the answer of each is as good.

One of them is for completions that fill in the middle: a node writes what stands around it in the
model's own tokens. That is done before the generation begins, so that every node that runs or continues
it computes the same prompt.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

from ryzanstein import clock, errors
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import TextPrompt, TokenPrompt
from ryzanstein.generation.request import MAX_STOP_TOKEN_IDS, GenerationRequest
from ryzanstein.router.failover.placement import RunnerPolicy
from ryzanstein.router.nodes.calls import texts
from ryzanstein.router.nodes.calls.texts import Infilled
from ryzanstein.router.nodes.links.link import NodeLink
from ryzanstein.router.nodes.roster import Roster

_ELSEWHERE = frozenset({Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED, Code.NOT_FOUND})
_PROBE_S = 0.25  # a breaker that becomes half-open is no event
_T = TypeVar("_T")


def _ignore(error: RyzansteinError) -> None:
    """Does nothing."""


class AnyNode:
    """The nodes of a roster, of which any may answer."""

    def __init__(self, links: Roster, policy: RunnerPolicy) -> None:
        self._links, self._policy = links, policy

    async def ask(
        self,
        model: str,
        deadline: float | None,
        call: Callable[[NodeLink], Awaitable[_T]],
        *,
        excluding: Mapping[str, int] = MappingProxyType({}),
        on_retry: Callable[[RyzansteinError], None] = _ignore,
    ) -> _T:
        """Returns the answer of the first node that gives one.

        `deadline` is Unix seconds, `excluding` what nodes were sent beside their streams, and `on_retry`
        is called with each error after which another node is asked. Raises NO_NODES when there was no
        node for `failover_wait_s`, DEADLINE_EXCEEDED, or a node's error where asking others does not
        help or `max_fruitless_attempts` have failed.
        """
        failed: dict[str, RyzansteinError] = {}
        num_failed, until = 0, time.monotonic() + self._policy.failover_wait_s
        while True:
            link = self._links.least_loaded(model, failed, excluding)
            if link is None:
                await self._wait(model, deadline, failed, until)
                failed.clear()
                continue
            try:
                return await call(link)
            except RyzansteinError as error:
                # Any number may say that they cannot do it: such a node does no work for the call.
                unable = error.code is Code.UNIMPLEMENTED or error.reason == errors.ENGINE_LACKS
                num_failed += not unable
                if not (unable or error.code in _ELSEWHERE) or num_failed >= self._policy.max_fruitless_attempts:
                    raise
                on_retry(error)
                failed[link.node_id] = error

    async def _wait(self, model: str, deadline: float | None, failed: dict[str, RyzansteinError], until: float) -> None:
        """Returns when another node may be asked; those that were lost are asked again then.

        Raises the last error where waiting does not help.
        """
        last = next(reversed(failed.values()), None)
        left_s = until - time.monotonic()
        if last is not None and (last.code is not Code.UNAVAILABLE or left_s <= 0):
            raise last
        if last is None and (drained := self._links.drained(model)):
            raise errors.all_drain(model, drained)
        if left_s <= 0:
            raise errors.no_nodes(model, f"none was available for {self._policy.failover_wait_s:g} s")
        if deadline is not None:
            left_s = min(left_s, deadline - clock.unix_s())
            if left_s <= 0:
                raise errors.deadline_exceeded()
        await self._links.changed(min(left_s, _PROBE_S) if last is None else left_s, model)


async def filled(request: GenerationRequest, deadline: float, nodes: AnyNode) -> GenerationRequest:
    """Returns a request to fill in the middle as one in tokens; any other as it is.

    Waits for a node as a generation does. The model must be named.
    """
    prompt = request.prompt
    if not isinstance(prompt, TextPrompt) or prompt.suffix is None:
        return request
    prefix, suffix = prompt.text, prompt.suffix
    for name in ("truncate_prompt_tokens", "keep_prompt_head"):
        if getattr(request.sampling, name) is not None:
            raise errors.invalid(f"sampling.{name}", "is not supported with a suffix")

    async def asked(link: NodeLink) -> Infilled:
        return await texts.infill(link, request.model, prefix, suffix, deadline)

    infilled = await nodes.ask(request.model, deadline, asked)
    stops = tuple(dict.fromkeys((*request.sampling.stop_token_ids, *infilled.stop_token_ids)))
    if len(stops) > MAX_STOP_TOKEN_IDS:
        most = MAX_STOP_TOKEN_IDS - len(infilled.stop_token_ids)
        raise errors.invalid("stop_token_ids", f"must have at most {most} entries with a suffix", len(stops))
    sampling = replace(request.sampling, stop_token_ids=stops)
    return replace(request, prompt=TokenPrompt(tuple(infilled.token_ids)), sampling=sampling)
