"""What the tenants of this router may use: requests are admitted, generations hold what they use, and it is counted.

A tenant without limits waits for nothing: it is counted when a generation ends. Limits are checked in
this router's memory, or in a store that all routers share. While that is away, each router gives out
its share of them, and what was used is reported later.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Protocol

from ryzanstein import errors
from ryzanstein.auth import refusals
from ryzanstein.auth.tenants import NO_LIMITS, TenantLimits
from ryzanstein.errors import RyzansteinError
from ryzanstein.process.background import Background
from ryzanstein.router.access.limits.backlog import UsageBacklog
from ryzanstein.router.access.limits.bounds import (
    UNBOUNDED,
    LimitAnswer,
    LimitBounds,
    LimitKind,
    TenantLevel,
    bounds_of,
)
from ryzanstein.router.access.limits.gcra import SECOND_US, now_us
from ryzanstein.router.access.limits.hold import STEP_TOKENS, Hold
from ryzanstein.router.access.limits.ledger import LocalLedger
from ryzanstein.router.access.limits.metrics import MAX_TOKENS, LimitMetrics
from ryzanstein.router.access.limits.shown import NO_HEADERS, duration, headers
from ryzanstein.router.access.limits.usage import UsageBook, UsageReport, UsageRow, checked_month, this_month

LimitsOf = Callable[[str], TenantLimits]

_CONCURRENT_RETRY_S = 1.0
_LOAD_S = 1.0
_ATTEND_S = 5.0
_RENEW_TURNS = 4
_MOST_LEVELS = 10_000


def no_limits(tenant: str) -> TenantLimits:
    """Returns the limits of a tenant where nobody has any."""
    return NO_LIMITS


class Limiter(Protocol):
    """The limits of tenants, as the core sees them."""

    def check_max_tokens(self, tenant: str, max_tokens: int | None) -> None:
        """Raises INVALID_ARGUMENT, naming the bound, for a longer answer than the tenant may ask for."""
        ...

    async def admit(self, tenant: str, generation_id: str, estimate: int) -> Hold:
        """Admits a request whose prompt has about so many tokens.

        Raises RESOURCE_EXHAUSTED RATE_LIMITED or QUOTA_EXHAUSTED; then nothing is charged.
        """
        ...

    def adopt(self, tenant: str, generation_id: str, prompt_tokens: int | None, num_tokens: int) -> Hold:
        """Holds a generation of another router, which is not charged again. `prompt_tokens` None: no node had accepted it."""
        ...

    def ends_at(self, hold: Hold, max_tokens: int | None, num_choices: int) -> None:
        """Bounds the answer of a request that names no bound, by that of its tenant."""
        ...

    def shown(self, tenant: str) -> Mapping[str, str]:
        """Returns the `x-ratelimit-…` headers of a tenant, from the last state known."""
        ...


class SharedLimits(UsageBook, Protocol):
    """Limits that all routers check in one place. Every method raises ConnectionError while it cannot be reached."""

    async def admit(
        self, tenant: str, bounds: LimitBounds, generation_id: str, estimate: int, before: Sequence[UsageReport]
    ) -> LimitAnswer:
        """Checks all limits at once and charges the request if none refuses. What is reported `before` counts already."""
        ...


class TenantAllowance:
    """The `Limiter` of a router.

    `limits_of` may be replaced while it runs; a generation keeps the limits that it began with.
    """

    def __init__(
        self,
        book: UsageBook,
        metrics: LimitMetrics,
        limits_of: LimitsOf = no_limits,
        *,
        shared: SharedLimits | None = None,
        linger_s: float = 0.05,
        wait_s: float = 0.5,
    ) -> None:
        """`book` is `shared` where limits are shared. A request waits for it at most `wait_s`."""
        self.limits_of = limits_of
        self._book, self._shared, self._metrics, self._wait_s = book, shared, metrics, wait_s
        self._ledger = LocalLedger()
        self._backlog = UsageBacklog(
            book, self, linger_s, on_written=self._written, on_total=self._totalled, on_state=self._changed
        )
        self._held: dict[str, dict[str, Hold]] = {}
        self._freeing: dict[str, dict[str, Hold]] = {}
        """Holds that have ended here and that the shared limits still count, by tenant."""
        self._levels: dict[str, tuple[float, TenantLevel]] = {}
        self.num_held = 0
        self._routers = 1
        metrics.holds.set_function(lambda: self.num_held)
        metrics.backlog.set_function(lambda: len(self._backlog))

    def check_max_tokens(self, tenant: str, max_tokens: int | None) -> None:
        bound = self.limits_of(tenant).max_tokens
        if bound is not None and max_tokens is not None and max_tokens > bound:
            self._metrics.refused(MAX_TOKENS)
            raise errors.invalid("sampling.max_tokens", f"must be at most {bound} for this tenant", max_tokens)

    async def admit(self, tenant: str, generation_id: str, estimate: int) -> Hold:
        bounds = self._bounds(tenant)
        hold = Hold(self, tenant, generation_id, bounds, estimate)
        if bounds is not UNBOUNDED:
            answer = await self._answer(hold)
            if answer.refused:
                raise self._refusal(tenant, bounds, answer)
        self._hold(hold)
        return hold

    def adopt(self, tenant: str, generation_id: str, prompt_tokens: int | None, num_tokens: int) -> Hold:
        hold = Hold(self, tenant, generation_id, self._bounds(tenant))
        if prompt_tokens is not None:
            hold.prompt, hold.requests, hold.confirmed = prompt_tokens, 1, True
        hold.generated = num_tokens
        hold.counted = hold.count  # by the metrics of the other router
        if hold.limited:
            hold.next_at, hold.local = num_tokens + STEP_TOKENS, self._shared is None
            now = now_us()
            self._ledger.count(tenant, hold.count.tokens, now)
            if hold.local:
                self._ledger.enter(tenant, generation_id, hold.count.tokens, now)
            self._backlog.put(hold)
        self._hold(hold)
        return hold

    def ends_at(self, hold: Hold, max_tokens: int | None, num_choices: int) -> None:
        bound = self.limits_of(hold.tenant).max_tokens
        if bound is not None and max_tokens is None:
            hold.ends_at(bound * num_choices)

    def shown(self, tenant: str) -> Mapping[str, str]:
        bounds = self._bounds(tenant)
        if bounds.requests is None and bounds.tokens is None:
            return NO_HEADERS
        return headers(bounds, self._level(tenant))

    async def usage(self, month: str, tenant: str | None) -> list[UsageRow]:
        """Returns what a tenant used in a month, or all of them. An empty month is this one.

        Raises INVALID_ARGUMENT for what is no month, UNAVAILABLE while the counts cannot be read.
        """
        month = checked_month(month)
        await self._backlog.flushed(_LOAD_S)
        try:
            return await self._book.rows(month, tenant)
        except ConnectionError as error:
            self._backlog.failed(error)
            raise errors.unavailable("USAGE_UNAVAILABLE", "the usage of tenants cannot be read at the moment") from error

    @contextlib.asynccontextmanager
    async def running(self, background: Background) -> AsyncGenerator[None, None]:
        """Counts in the background. At the end what is counted is stored, if the store can be reached."""
        tasks = (
            background.supervise("usage", self._backlog.run),
            background.supervise("limits", self._attend),
        )
        try:
            yield
        finally:
            await self._backlog.flushed(_LOAD_S)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._book.close()

    # What a hold tells.

    def reports(self, hold: Hold) -> None:
        more = hold.count.beyond(hold.counted)
        limited = hold.limited
        if more.tokens or more.requests:
            hold.counted = hold.counted.plus(more)
            self._metrics.used(hold.tenant, more)
        if limited:
            self._charge(hold, more.tokens)
        if hold.live:
            self._hold(hold)
        else:
            self._unhold(hold)
        if limited or hold.requests:
            self._backlog.put(hold)

    def left(self, hold: Hold) -> None:
        if hold.local:
            tokens = hold.prompt + hold.generated
            self._ledger.charge(
                hold.tenant, self._share(hold.bounds), hold.generation_id, tokens, now_us(), confirmed=True, ends=True
            )
        self._unhold(hold)
        self._backlog.drop(hold)
        self.folded(hold)

    def folded(self, hold: Hold) -> None:
        if (freeing := self._freeing.get(hold.tenant)) is not None:
            freeing.pop(hold.generation_id, None)
            if not freeing:
                del self._freeing[hold.tenant]

    def is_over(self, hold: Hold) -> bool:
        month = hold.bounds.month
        return month is not None and self.limits_of(hold.tenant).hard_month and self._used(hold.tenant) >= month

    # How a request is admitted.

    async def _answer(self, hold: Hold) -> LimitAnswer:
        if self._shared is None:
            if hold.bounds.month is not None and not self._ledger.knows(hold.tenant, this_month()):
                await self._learn(hold.tenant)
            return self._answer_alone(hold)
        if not self._backlog.up:
            return self._answer_alone(hold)
        answer = await self._shared_answer(self._shared, hold)
        if answer is None:
            answer = self._answer_alone(hold)
            if answer.refused:
                hold.release()  # it may have been admitted there
        return answer

    async def _shared_answer(self, shared: SharedLimits, hold: Hold) -> LimitAnswer | None:
        """Returns what the routers' common limits answer; None if that does not come in time."""
        freeing = [each for each in self._freeing.get(hold.tenant, {}).values() if not each.sending]
        reports = [each.report for each in freeing]
        for each in freeing:
            each.sending = True
        try:
            async with asyncio.timeout(self._wait_s):
                answer = await shared.admit(hold.tenant, hold.bounds, hold.generation_id, hold.estimate, reports)
        except (ConnectionError, TimeoutError) as error:
            self._backlog.failed(error)
            return None
        except asyncio.CancelledError:
            hold.release()  # it may have been admitted
            raise
        finally:
            for each in freeing:
                each.sending = False
        for each, report in zip(freeing, reports, strict=True):
            self._written(each, report)
            if not each.live:
                self._backlog.drop(each)
        self._learned(hold, answer.level)
        return answer

    def _learned(self, hold: Hold, level: TenantLevel) -> None:
        if len(self._levels) >= _MOST_LEVELS:
            self._levels.clear()
        now = now_us()
        self._levels[hold.tenant] = now, level
        if hold.bounds.month is not None:
            self._ledger.stored(hold.tenant, this_month(), level.used, 0, now)

    def _answer_alone(self, hold: Hold) -> LimitAnswer:
        """Answers from this router's memory, by its share of the limits."""
        tenant, now = hold.tenant, now_us()
        if self._shared is not None and (level := self._levels.pop(tenant, None)) is not None:
            self._ledger.seed(tenant, _later(level[1], now - level[0]), now)
        running = len(self._held.get(tenant, ()))
        answer = self._ledger.admit(
            tenant, self._share(hold.bounds), hold.generation_id, hold.estimate, running=running, now=now
        )
        hold.local = not answer.refused
        return answer

    async def _learn(self, tenant: str) -> None:
        """Reads what a tenant has used of this month. Where it cannot be read the request does not wait for it again."""
        try:
            async with asyncio.timeout(_LOAD_S):
                month, total = await self._book.total(tenant)
        except (ConnectionError, TimeoutError) as error:
            self._backlog.failed(error)
            month, total = this_month(), 0
        self._ledger.stored(tenant, month, total, 0, now_us())

    def _refusal(self, tenant: str, bounds: LimitBounds, answer: LimitAnswer) -> RyzansteinError:
        kind, limits, level = answer.refused, self.limits_of(tenant), answer.level
        self._metrics.refused(kind.label)
        wait_s = answer.wait_us / SECOND_US
        match kind:
            case LimitKind.REQUESTS_PER_SECOND:
                limit, reset = limits.requests_per_second or 0, level.requests_full_in_us
            case LimitKind.TOKENS_PER_MINUTE:
                limit, reset = limits.tokens_per_minute or 0, level.tokens_full_in_us
            case LimitKind.CONCURRENT:
                limit, reset, wait_s = limits.concurrent or 0, _CONCURRENT_RETRY_S * SECOND_US, _CONCURRENT_RETRY_S
            case _:
                month = bounds.month or 0
                return refusals.quota_exhausted(kind.label, month, max(0, month - level.used), tenant=tenant)
        remaining = 0
        if kind is LimitKind.TOKENS_PER_MINUTE and bounds.tokens is not None:
            remaining = bounds.tokens.remaining(level.tokens_full_in_us)
        return refusals.rate_limited(
            kind.label, limit, remaining, duration(reset / SECOND_US), retry_after_s=wait_s, tenant=tenant
        )

    # What is counted.

    def _charge(self, hold: Hold, more_tokens: int) -> None:
        tenant, now = hold.tenant, now_us()
        self._ledger.count(tenant, more_tokens, now)
        if hold.local:
            tokens, ends = hold.prompt + hold.generated, not hold.live
            bounds = self._share(hold.bounds)
            self._ledger.charge(tenant, bounds, hold.generation_id, tokens, now, confirmed=hold.confirmed, ends=ends)
            if hold.refund:
                self._ledger.refund_request(tenant, bounds, now)
        if self._shared is not None and not hold.live:
            self._freeing.setdefault(tenant, {})[hold.generation_id] = hold

    def _hold(self, hold: Hold) -> None:
        holds = self._held.setdefault(hold.tenant, {})
        if hold.generation_id not in holds:
            holds[hold.generation_id] = hold
            self.num_held += 1

    def _unhold(self, hold: Hold) -> None:
        holds = self._held.get(hold.tenant, {})
        if holds.pop(hold.generation_id, None) is not None:
            self.num_held -= 1
            if not holds:
                del self._held[hold.tenant]

    def _written(self, hold: Hold, report: UsageReport) -> None:
        """Learns that a report is in the store."""
        more = report.count.beyond(hold.known)
        hold.known = hold.known.plus(more)
        if hold.limited:
            self._ledger.count(hold.tenant, -more.tokens, now_us())
        if not report.live and not hold.live:
            self.folded(hold)

    def _totalled(self, tenant: str, month: str, total: int) -> None:
        """Learns what a tenant has used of the month, which may be all of it."""
        held = self._held.get(tenant)
        if self._bounds(tenant) is UNBOUNDED:
            return
        self._ledger.stored(tenant, month, total, 0, now_us())
        for hold in (held or {}).values():
            if self.is_over(hold):
                hold.next_at = 0

    def _changed(self, up: bool) -> None:
        self._metrics.degraded.set(not up)

    async def _attend(self) -> None:
        """Counts the routers, and renews what runs here."""
        for turn in itertools.count():
            if self._backlog.up:
                try:
                    self._routers = max(1, await self._book.attend())
                except ConnectionError as error:
                    self._backlog.failed(error)
                if self._shared is not None and turn % _RENEW_TURNS == 0:
                    self._renew()
            await asyncio.sleep(_ATTEND_S)

    def _renew(self) -> None:
        for holds in self._held.values():
            for hold in holds.values():
                if hold.limited:
                    self._backlog.put(hold)

    def _bounds(self, tenant: str) -> LimitBounds:
        limits = self.limits_of(tenant)
        return UNBOUNDED if limits is NO_LIMITS else bounds_of(limits)

    def _share(self, bounds: LimitBounds) -> LimitBounds:
        return bounds.share(self._routers)

    def _used(self, tenant: str) -> int:
        return self._ledger.used(tenant)

    def _level(self, tenant: str) -> TenantLevel:
        now = now_us()
        if self._shared is not None and (seen := self._levels.get(tenant)) is not None:
            return _later(seen[1], now - seen[0])
        return self._ledger.level(tenant, len(self._held.get(tenant, ())), now)


class NoAllowance:
    """A `Limiter` without limits that counts nothing."""

    def check_max_tokens(self, tenant: str, max_tokens: int | None) -> None: ...

    async def admit(self, tenant: str, generation_id: str, estimate: int) -> Hold:
        return Hold(self, tenant, generation_id, UNBOUNDED)

    def adopt(self, tenant: str, generation_id: str, prompt_tokens: int | None, num_tokens: int) -> Hold:
        return Hold(self, tenant, generation_id, UNBOUNDED)

    def ends_at(self, hold: Hold, max_tokens: int | None, num_choices: int) -> None: ...

    def shown(self, tenant: str) -> Mapping[str, str]:
        return NO_HEADERS

    def reports(self, hold: Hold) -> None: ...

    def left(self, hold: Hold) -> None: ...

    def folded(self, hold: Hold) -> None: ...

    def is_over(self, hold: Hold) -> bool:
        return False


def _later(level: TenantLevel, after_us: float) -> TenantLevel:
    requests, tokens = level.requests_full_in_us - after_us, level.tokens_full_in_us - after_us
    return TenantLevel(max(0.0, requests), max(0.0, tokens), level.running, level.used)
