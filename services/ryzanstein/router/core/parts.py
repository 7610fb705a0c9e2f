"""What a core is built from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from ryzanstein.observe.tracing import Tracing
from ryzanstein.router.access.limits.allowance import Limiter, NoAllowance
from ryzanstein.router.core.admission import Limits
from ryzanstein.router.failover.hedges import HedgePolicy
from ryzanstein.router.failover.placement import RunnerPolicy
from ryzanstein.router.generations.idempotency import SharedKeys, UnsharedKeys
from ryzanstein.router.generations.recorder import Recorder, Unrecorded
from ryzanstein.router.generations.retained import UnreadTurns
from ryzanstein.router.nodes.roster import Roster
from ryzanstein.router.sessions.turn import Turns
from ryzanstein.router.telemetry import RouterTelemetry


class OtherRouters(Protocol):
    """The other routers."""

    async def interrupt(self, owner_id: str, generation_id: str) -> bool:
        """See `LocalCore.interrupt`. Also returns False when that router does not answer."""
        ...


@dataclass(frozen=True, slots=True)
class CorePolicy:
    """The limits and times of a core.

    `deadline_s` applies to requests without a deadline. `reattach_window_s` and
    `max_retained_tokens` bound what can be read without a reader having stayed. Without a reader a
    generation runs for `unread_grace_s`. `unread_turns` says what a session keeps of a generation
    that is ended because it has no reader. `keep_prompt_head` applies to requests without it.
    """

    runner: RunnerPolicy
    limits: Limits
    deadline_s: float = 600.0
    reattach_window_s: float = 30.0
    unread_grace_s: float = 5.0
    unread_turns: UnreadTurns = "keep"
    max_retained_tokens: int = 1_000_000
    hedges: HedgePolicy = field(default_factory=HedgePolicy)
    keep_prompt_head: int | None = None


@dataclass(frozen=True, slots=True)
class CoreParts:
    """The parts of a router that its core uses.

    By default no journal records the generations, no other router shares their keys, and tenants
    have no limits.
    """

    links: Roster
    turns: Turns
    policy: CorePolicy
    telemetry: RouterTelemetry
    tracing: Tracing
    recorder: Recorder = field(default_factory=Unrecorded)
    keys: SharedKeys = field(default_factory=UnsharedKeys)
    others: OtherRouters | None = None
    allowance: Limiter = field(default_factory=NoAllowance)
