"""Whether our own sampler runs in a server, so that answers go on exactly."""

from __future__ import annotations

from contextlib import aclosing

from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.engines.asking import AskedRow, packed
from ryzanstein.worker.engines.remote.answers.computing import computed
from ryzanstein.worker.engines.remote.asked import AskedChoice
from ryzanstein.worker.engines.remote.dialects.dialect import ServedEngine
from ryzanstein.worker.engines.remote.dialects.vllm import VllmDialect
from ryzanstein.worker.engines.remote.http.client import EngineClient
from ryzanstein.worker.engines.remote.http.faults import EngineProtocolError, EngineRefused

_PROMPT = (1, 2, 3)
_FORCED = (6, 4, 7)
"""Ids that every vocabulary has, and that no model computes in this order twice."""


async def has_sampler(client: EngineClient, served: ServedEngine) -> bool:
    """Returns whether the server obeys a request that only our sampler understands. Raises EngineUnreachable, EngineBusy.

    It asks for log probabilities too: vLLM compiles for them when they are first asked for, for ten seconds and more.
    """
    if not isinstance(served.dialect, VllmDialect):
        return False
    arguments = packed(AskedRow(forced=list(_FORCED)))
    sampling = SamplingParams(temperature=0.0, logprobs=1)
    asked = AskedChoice(_PROMPT, len(_PROMPT), sampling, 0, len(_FORCED), 0, (), request_id="probe", arguments=arguments)
    got: list[int] = []
    try:
        async with aclosing(computed(client, served, asked)) as parts:
            async for part in parts:
                got += [token.token_id for token in part.tokens]
    except (EngineRefused, EngineProtocolError):
        return False  # a release that does not know the argument
    return tuple(got) == _FORCED
