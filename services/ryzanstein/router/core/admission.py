"""Admission of requests: bounds on running and waiting generations and on the size of a request.

A request over a bound gets a typed error at once.

No tenant can take all places: each may have at most `TENANT_SHARE` times the places that are left
(dynamic thresholds, Choudhury and Hahne 1998). A tenant that is alone gets eight ninths, two
tenants that want everything get 8/17 each, and there is always a place for one more tenant.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ryzanstein import errors
from ryzanstein.generation.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from ryzanstein.router.telemetry import RouterTelemetry

TENANT_SHARE = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of one router.

    `max_waiting` counts, per model, the generations that no node has accepted yet.
    """

    max_running: int = 4096
    max_waiting: int = 1024
    max_messages: int = 2048
    max_prompt_chars: int = 1_000_000
    max_prompt_tokens: int = 262_144


class Place:
    """The place of one generation, from before its first await to its end.

    Later checks count it at once. Call `leave` on every exit path; a second call has no effect.
    """

    def __init__(self, admission: Admission, tenant: str) -> None:
        self._admission = admission
        self._tenant = tenant
        self._model: str | None = None
        self.held = True

    def wait_for(self, model: str, waiting: int) -> None:
        """Counts the generation as about to wait for a node.

        `waiting` others of the model wait already. Raises QUEUE_FULL at the limit of waiting
        generations.
        """
        self._admission.enter_line(model, waiting)
        self._model = model

    def launched(self) -> None:
        """Stops counting it as about to wait: its runner counts it as waiting from now on."""
        if self._model is not None:
            self._admission.leave_line(self._model)
            self._model = None

    def belongs_to(self, tenant: str) -> None:
        """Moves the place to its tenant, which is known only now.

        A generation that a router takes over is not held to its tenant's share.
        """
        self._admission.pass_on(self._tenant, tenant)
        self._tenant = tenant

    def leave(self) -> None:
        if self.held:
            self.held = False
            self.launched()
            self._admission.leave(self._tenant)


class Admission:
    """Checks requests against the limits, and counts places by tenant."""

    def __init__(self, limits: Limits, telemetry: RouterTelemetry) -> None:
        self._limits = limits
        self._telemetry = telemetry
        self._places: Counter[str] = Counter()
        self._entering: Counter[str] = Counter()

    @property
    def running(self) -> int:
        """The number of generations that run or are about to."""
        return self._places.total()

    def entering(self, model: str) -> int:
        """Returns how many generations of the model are about to wait for a node."""
        return self._entering[model]

    def enter(self, tenant: str) -> Place:
        """Returns a place for a generation of the tenant.

        Raises RESOURCE_EXHAUSTED QUEUE_FULL at the limit of running generations, in total or of
        this tenant.
        """
        self._below(self.running, self._limits.max_running)
        share = TENANT_SHARE * (self._limits.max_running - self.running)
        if self._places[tenant] >= share:
            self._telemetry.refused.labels("tenant_share").inc()
            raise errors.queue_full(self._places[tenant], share)
        return self._taken(tenant)

    def enter_unnamed(self) -> Place:
        """Returns a place for a generation whose tenant is not known yet.

        Raises QUEUE_FULL at the limit of running generations.
        """
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

    def check_size(self, prompt: Prompt, path: str = "") -> None:
        """Raises INVALID_ARGUMENT, naming the field and the bound, for a prompt that is too big.

        `path` comes before the name of the field.
        """
        match prompt:
            case ChatPrompt(messages):
                self._at_most("messages", "messages", len(messages), self._limits.max_messages)
                chars = prompt.num_chars
                self._at_most("messages", "characters in total", chars, self._limits.max_prompt_chars)
            case TextPrompt(text, suffix):
                self._at_most(f"{path}text", "characters", len(text) + len(suffix or ""), self._limits.max_prompt_chars)
            case TokenPrompt(token_ids):
                self._at_most(f"{path}token_ids", "ids", len(token_ids), self._limits.max_prompt_tokens)

    def _at_most(self, field: str, what: str, count: int, bound: int) -> None:
        if count > bound:
            self._telemetry.refused.labels("too_big").inc()
            raise errors.invalid(field, f"must have at most {bound} {what}", count)

    def _below(self, count: int, bound: int) -> None:
        if count >= bound:
            self._telemetry.refused.labels("queue_full").inc()
            raise errors.queue_full(count, bound)


def _take_one(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]
