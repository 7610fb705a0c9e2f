"""Who may come in: bounds on what runs, what waits and how big a request is. Over a bound: a typed error at once.

No tenant can take all the room for what runs: each may have at most `TENANT_SHARE` times what is left of it (dynamic
thresholds, Choudhury and Hahne 1998). One that is alone gets eight ninths, two that want everything get 8/17 each, and there
is always room for one more.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ryzanstein import errors
from ryzanstein.generation import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from ryzanstein.router.telemetry import Telemetry

TENANT_SHARE = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one router. `max_waiting` counts, per model, the generations that no node has accepted yet."""

    max_running: int = 4096
    max_waiting: int = 1024
    max_messages: int = 2048
    max_prompt_chars: int = 1_000_000
    max_prompt_tokens: int = 1_000_000


class Admission:
    """Checks requests against limits, and counts what runs of each tenant."""

    def __init__(self, limits: Limits, telemetry: Telemetry) -> None:
        self._limits = limits
        self._telemetry = telemetry
        self._running: Counter[str] = Counter()

    def enter(self, tenant: str) -> None:
        """A generation of the tenant runs. Pair with `leave`."""
        self._running[tenant] += 1

    def leave(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]

    def check_size(self, prompt: Prompt) -> None:
        """INVALID_ARGUMENT naming the field and the bound."""
        match prompt:
            case ChatPrompt(messages):
                self._at_most("messages", "messages", len(messages), self._limits.max_messages)
                chars = sum(len(message.content) for message in messages)
                self._at_most("messages", "characters in all", chars, self._limits.max_prompt_chars)
            case TextPrompt(text):
                self._at_most("text", "characters", len(text), self._limits.max_prompt_chars)
            case TokenPrompt(token_ids):
                self._at_most("token_ids", "ids", len(token_ids), self._limits.max_prompt_tokens)

    def _at_most(self, field: str, what: str, count: int, bound: int) -> None:
        if count > bound:
            self._telemetry.refused.labels("too_big").inc()
            raise errors.invalid(field, f"has at most {bound} {what}", count)

    def check_running(self, running: int) -> None:
        """RESOURCE_EXHAUSTED QUEUE_FULL when as many run as may."""
        self._below(running, self._limits.max_running)

    def check_room(self, running: int, waiting: int, tenant: str) -> None:
        """RESOURCE_EXHAUSTED QUEUE_FULL when as many run, or wait for the same model, as may, or as may of this tenant."""
        self.check_running(running)
        self._below(waiting, self._limits.max_waiting)
        share = TENANT_SHARE * (self._limits.max_running - running)
        if self._running[tenant] >= share:
            self._telemetry.refused.labels("tenant_share").inc()
            raise errors.queue_full(self._running[tenant], share)

    def _below(self, count: int, bound: int) -> None:
        if count >= bound:
            self._telemetry.refused.labels("queue_full").inc()
            raise errors.queue_full(count, bound)
