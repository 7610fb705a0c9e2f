"""Time limits of a server beside the node."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from ryzanstein.bounds import PositiveSeconds
from ryzanstein.worker.supervision.watchdog import StallBounds

DialectName = Literal["auto", "vllm", "sglang", "llama.cpp", "tensorrt-llm"]
"""How a server speaks; auto: it is asked."""
SamplerUse = Literal["auto", "require", "off"]
"""Whether our own sampler in the server decides tokens; auto: where it is there."""


@dataclass(frozen=True, slots=True)
class RemoteBounds:
    """Time limits of a server beside the node, in seconds."""

    start_s: PositiveSeconds = 1800.0
    """A server that does not answer for so long counts as a failed start: it may be loading a large model."""
    retry_s: PositiveSeconds = 0.5
    """Interval of questions to a server that does not answer yet."""
    health_s: PositiveSeconds = 2.0
    """A server that does not answer its health check within this time is lost."""
    check_s: PositiveSeconds = 1.0
    """Interval of health checks while nothing runs."""
    watch_interval_s: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Interval of the watchdog's checks."""
    prefill_s: PositiveSeconds = 20.0
    """While a server computes its first prompts, nothing may come from it for so long at least."""
    stall: StallBounds = field(default_factory=StallBounds)
