"""The limits of tenants in this router's memory: for a router alone, and while Redis is away.

It checks all limits of a tenant and writes nothing if one refuses. Knows no clock and no store.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ryzanstein.router.access.limits.bounds import LimitAnswer, LimitBounds, LimitKind, TenantLevel

_MOST_IDLE = 10_000


@dataclass(slots=True)
class _HeldTokens:
    """What one generation has taken: from the bucket, and reserved of the month until its prompt is counted."""

    charged: int
    reserved: int


@dataclass(slots=True)
class _LedgerTenant:
    requests_full_at: float = 0.0
    tokens_full_at: float = 0.0
    reserved: int = 0
    month: str = ""
    stored: int = 0
    """Tokens of the month in the store, as far as they are known."""
    pending: int = 0
    """Those that are not there yet."""
    held: dict[str, _HeldTokens] = field(default_factory=dict)


class LocalLedger:
    """The buckets, holds and months of this router's tenants."""

    def __init__(self) -> None:
        self._tenants: dict[str, _LedgerTenant] = {}
        self._look_at = _MOST_IDLE

    def admit(
        self, tenant: str, bounds: LimitBounds, generation_id: str, estimate: int, *, running: int, now: float
    ) -> LimitAnswer:
        """Charges a request of about so many tokens, or refuses it and changes nothing.

        `running`: the generations of the tenant that run. A generation that is held already is charged once.
        """
        state = self._state(tenant, now)
        if generation_id in state.held:
            return LimitAnswer(LimitKind.NONE, 0.0, self._level(state, running, now))
        refused, wait_us = self._refused(state, bounds, estimate, running, now)
        if refused:
            return LimitAnswer(refused, wait_us, self._level(state, running, now))
        if bounds.requests is not None:
            state.requests_full_at = bounds.requests.charged(state.requests_full_at, now, 1)
        if bounds.tokens is not None:
            state.tokens_full_at = bounds.tokens.charged(state.tokens_full_at, now, estimate)
        state.held[generation_id] = _HeldTokens(estimate, estimate)
        state.reserved += estimate
        return LimitAnswer(LimitKind.NONE, 0.0, self._level(state, running + 1, now))

    def enter(self, tenant: str, generation_id: str, tokens: int, now: float) -> None:
        """Holds a generation that was charged elsewhere, of which so many tokens are counted."""
        self._state(tenant, now).held.setdefault(generation_id, _HeldTokens(tokens, 0))

    def charge(
        self, tenant: str, bounds: LimitBounds, generation_id: str, tokens: int, now: float, *, confirmed: bool, ends: bool
    ) -> None:
        """Charges a generation for all its tokens so far, instead of what it was charged before.

        `confirmed`: its prompt is among them, and what was reserved for that is free. `ends`: it is not held any more.
        """
        state = self._state(tenant, now)
        held = state.held.get(generation_id)
        if held is None:
            return
        if confirmed or ends:
            state.reserved -= held.reserved
            held.reserved = 0
        target = held.reserved + tokens
        if bounds.tokens is not None and target != held.charged:
            state.tokens_full_at = bounds.tokens.charged(state.tokens_full_at, now, target - held.charged)
        held.charged = target
        if ends:
            del state.held[generation_id]

    def refund_request(self, tenant: str, bounds: LimitBounds, now: float) -> None:
        """Gives a request back that did nothing."""
        if bounds.requests is not None:
            state = self._state(tenant, now)
            state.requests_full_at = bounds.requests.charged(state.requests_full_at, now, -1)

    def level(self, tenant: str, running: int, now: float) -> TenantLevel:
        return self._level(self._state(tenant, now), running, now)

    def seed(self, tenant: str, level: TenantLevel, now: float) -> None:
        """Starts with buckets as another ledger has them: what is used up there is used up here."""
        state = self._state(tenant, now)
        state.requests_full_at = max(state.requests_full_at, now + level.requests_full_in_us)
        state.tokens_full_at = max(state.tokens_full_at, now + level.tokens_full_in_us)

    def count(self, tenant: str, tokens: int, now: float) -> None:
        """Counts tokens of the month that the store does not have yet."""
        self._state(tenant, now).pending += tokens

    def pending(self, tenant: str) -> int:
        """Returns the tokens of the month that the store does not have yet."""
        state = self._tenants.get(tenant)
        return 0 if state is None else state.pending

    def stored(self, tenant: str, month: str, total: int, tokens: int, now: float) -> None:
        """Learns the total of a month in the store, and that so many of the pending tokens are in it."""
        state = self._state(tenant, now)
        state.month, state.stored = month, total
        state.pending -= tokens

    def knows(self, tenant: str, month: str) -> bool:
        """Returns whether the total of that month was learned from the store."""
        state = self._tenants.get(tenant)
        return state is not None and state.month == month

    def used(self, tenant: str) -> int:
        """Returns the tokens of the month, as far as they are known here."""
        state = self._tenants.get(tenant)
        return 0 if state is None else state.stored + state.pending

    def _refused(
        self, state: _LedgerTenant, bounds: LimitBounds, estimate: int, running: int, now: float
    ) -> tuple[LimitKind, float]:
        if bounds.month is not None and state.stored + state.pending + state.reserved + estimate > bounds.month:
            return LimitKind.TOKENS_PER_MONTH, 0.0
        if bounds.concurrent is not None and running >= bounds.concurrent:
            return LimitKind.CONCURRENT, 0.0
        if bounds.requests is not None and (wait_us := bounds.requests.wait_us(state.requests_full_at, now, 1)) > 0:
            return LimitKind.REQUESTS_PER_SECOND, wait_us
        if bounds.tokens is not None and (wait_us := bounds.tokens.wait_us(state.tokens_full_at, now, estimate)) > 0:
            return LimitKind.TOKENS_PER_MINUTE, wait_us
        return LimitKind.NONE, 0.0

    def _level(self, state: _LedgerTenant, running: int, now: float) -> TenantLevel:
        requests, tokens = state.requests_full_at - now, state.tokens_full_at - now
        return TenantLevel(max(0.0, requests), max(0.0, tokens), running, state.stored + state.pending)

    def _state(self, tenant: str, now: float) -> _LedgerTenant:
        state = self._tenants.get(tenant)
        if state is None:
            if len(self._tenants) >= self._look_at:
                self._forget_idle(now)
            state = self._tenants[tenant] = _LedgerTenant()
        return state

    def _forget_idle(self, now: float) -> None:
        """Forgets tenants that would begin anew as they are, but for their month, which the store has."""
        idle = [
            tenant
            for tenant, state in self._tenants.items()
            if not state.held and not state.pending and state.requests_full_at <= now and state.tokens_full_at <= now
        ]
        for tenant in idle:
            del self._tenants[tenant]
        self._look_at = max(_MOST_IDLE, 2 * len(self._tenants))
