"""Whether our own sampler runs in a server, so that answers go on exactly."""

from __future__ import annotations

from contextlib import aclosing
from typing import NamedTuple

from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.engines.asking import NUM_PROBED, PROBE, SIGN
from ryzanstein.worker.engines.remote.answers.computing import computed
from ryzanstein.worker.engines.remote.asked import AskedChoice
from ryzanstein.worker.engines.remote.dialects.dialect import ServedEngine
from ryzanstein.worker.engines.remote.dialects.vllm import VllmDialect
from ryzanstein.worker.engines.remote.http.client import EngineClient
from ryzanstein.worker.engines.remote.http.faults import EngineProtocolError, EngineRefused

_PROMPT = (1, 2, 3)


class FoundSampler(NamedTuple):
    """Our sampler in a server: the protocol that it speaks, and the version of its llguidance, zeros without one."""

    protocol: int
    guidance: tuple[int, ...]


async def found_sampler(client: EngineClient, served: ServedEngine) -> FoundSampler | None:
    """Returns our sampler in the server; None: it has none. Raises EngineUnreachable, EngineBusy.

    It asks for log probabilities too: vLLM compiles for them when they are first asked for, for ten seconds and more.
    """
    if not isinstance(served.dialect, VllmDialect):
        return None
    sampling = SamplingParams(temperature=0.0, logprobs=1)
    arguments = {PROBE: "protocol"}
    asked = AskedChoice(_PROMPT, len(_PROMPT), sampling, 0, NUM_PROBED, 0, (), request_id="probe", arguments=arguments)
    got: list[int] = []
    try:
        async with aclosing(computed(client, served, asked)) as parts:
            async for part in parts:
                got += [token.token_id for token in part.tokens]
    except (EngineRefused, EngineProtocolError):
        return None  # a release that does not know the argument
    if len(got) != NUM_PROBED or tuple(got[: len(SIGN)]) != SIGN:
        return None
    protocol, *guidance = got[len(SIGN) :]
    return FoundSampler(protocol, tuple(guidance))


def same_guidance(found: FoundSampler) -> bool:
    """Returns whether constraints mean the same there as on this node."""
    try:
        from ryzanstein.worker.constraints.guidance import guidance_version
    except ImportError:
        return False
    return found.guidance == guidance_version()
