"""What a tenant may use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """The limits of one tenant; None: no limit.

    `burst` is how many requests may come at once; None: one second's. `tokens_per_minute` and
    `tokens_per_month` count prompts and answers. `concurrent` bounds running generations. With
    `hard_month` an answer ends where the month's tokens do. `max_tokens` bounds one answer, `sessions`
    the conversations that are kept.
    """

    requests_per_second: float | None = None
    burst: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    tokens_per_month: int | None = None
    hard_month: bool = False
    max_tokens: int | None = None
    sessions: int | None = None
