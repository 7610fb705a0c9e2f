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
from ryzanstein.router.telemetry import RouterTelemetry

TENANT_SHARE = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one router. `max_waiting` counts, per model, the generations that no node has accepted yet."""

    max_running: int = 4096
    max_waiting: int = 1024
    max_messages: int = 2048
    max_prompt_chars: int = 1_000_000
    max_prompt_tokens: int = 262_144


class Place:
    """One generation's room, from before its first wait to its end: whoever checks next finds it taken. `leave` it on every way
    out; twice is once."""

    def __init__(self, admission: Admission, tenant: str) -> None:
        self._admission = admission
        self._tenant = tenant
        self._model: str | None = None
        self.held = True

    def wait_for(self, model: str, waiting: int) -> None:
        """It is about to wait for a node, as `waiting` others of the model do. QUEUE_FULL when that is as many as may."""
        self._admission.enter_line(model, waiting)
        self._model = model

    def launched(self) -> None:
        """From now on it is counted among those that wait by whoever runs it."""
        if self._model is not None:
            self._admission.leave_line(self._model)
            self._model = None

    def belongs_to(self, tenant: str) -> None:
        """Known only now; what a router takes over is not held to a tenant's share."""
        self._admission.pass_on(self._tenant, tenant)
        self._tenant = tenant

    def leave(self) -> None:
        if self.held:
            self.held = False
            self.launched()
            self._admission.leave(self._tenant)


class Admission:
    """Checks requests against limits, and counts what has a place, by tenant."""

    def __init__(self, limits: Limits, telemetry: RouterTelemetry) -> None:
        self._limits = limits
        self._telemetry = telemetry
        self._places: Counter[str] = Counter()
        self._entering: Counter[str] = Counter()

    @property
    def running(self) -> int:
        """Generations that run or are about to."""
        return self._places.total()

    def entering(self, model: str) -> int:
        """How many are about to wait for a node."""
        return self._entering[model]

    def enter(self, tenant: str) -> Place:
        """RESOURCE_EXHAUSTED QUEUE_FULL when as many run as may, or as may of this tenant."""
        self._below(self.running, self._limits.max_running)
        share = TENANT_SHARE * (self._limits.max_running - self.running)
        if self._places[tenant] >= share:
            self._telemetry.refused.labels("tenant_share").inc()
            raise errors.queue_full(self._places[tenant], share)
        return self._taken(tenant)

    def enter_unnamed(self) -> Place:
        """For a generation whose tenant is not known yet. QUEUE_FULL when as many run as may."""
        self._below(self.running, self._limits.max_running)
        return self._taken("")

    def _taken(self, tenant: str) -> Place:
        self._places[tenant] += 1
        return Place(self, tenant)

    def leave(self, tenant: str) -> None:
        _take_one(self._places, tenant)

    def pass_on(self, tenant: str, to: str) -> None:
        _take_one(self._places, tenant)
        self._places[to] += 1

    def enter_line(self, model: str, waiting: int) -> None:
        self._below(waiting + self._entering[model], self._limits.max_waiting)
        self._entering[model] += 1

    def leave_line(self, model: str) -> None:
        _take_one(self._entering, model)

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

    def _below(self, count: int, bound: int) -> None:
        if count >= bound:
            self._telemetry.refused.labels("queue_full").inc()
            raise errors.queue_full(count, bound)


def _take_one(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]
