"""Admission of requests: bounds on running and waiting generations and on the size of a request.

A request over a bound gets a typed error at once.

No tenant can take all places, or all bytes of prompts: each may have at most `TENANT_SHARE` times
what is left (dynamic thresholds, Choudhury and Hahne 1998). A tenant that is alone gets eight ninths,
two tenants that want everything get 8/17 each, and there is always room for one more tenant.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ryzanstein import errors
from ryzanstein.generation.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from ryzanstein.observe.requests import FoundRequest, RequestStage
from ryzanstein.router.telemetry import RouterTelemetry

TENANT_SHARE = 8
_MESSAGE_BYTES = 256
_BYTES_PER_TOKEN = 3
_TOKEN_BYTES = 36  # an integer, and its place in a tuple


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of one router.

    `max_waiting` counts, per model, the generations that no node has accepted yet.
    `max_held_prompt_bytes` bounds the prompts of all generations together that run, or may go on.
    """

    max_running: int = 4096
    max_waiting: int = 1024
    max_messages: int = 2048
    max_prompt_chars: int = 1_000_000
    max_prompt_tokens: int = 262_144
    max_held_prompt_bytes: int = 128 * 2**20


class Arrivals:
    """Requests that no generation stands for: not yet, or never."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[RequestStage, str, str, float]] = {}

    @contextmanager
    def during(self, stage: RequestStage, number: str, request_id: str, model: str) -> Iterator[None]:
        """Makes a request found while a block runs. `number` is that of its generation, or another one that no request has."""
        self._begun[number] = stage, request_id, model, time.monotonic()
        try:
            yield
        finally:
            del self._begun[number]

    def __iter__(self) -> Iterator[FoundRequest]:
        now = time.monotonic()
        for number, (stage, request_id, model, began_at) in self._begun.items():
            yield FoundRequest(request_id, number, model, stage, now - began_at, now - began_at, 0, "", 0)


class HeldPrompt:
    """The memory of one generation's prompt, from before its first await until it is no longer needed.

    Call `release` then; a second call has no effect.
    """

    def __init__(self, admission: Admission, tenant: str, num_bytes: int) -> None:
        self._admission, self._tenant, self.num_bytes = admission, tenant, num_bytes

    def grow_to(self, prompt: Prompt) -> None:
        """Holds what came to the prompt: the messages of its session. Raises QUEUE_FULL as `Admission.hold` does."""
        self.num_bytes += self._admission.take(self._tenant, num_bytes_of(prompt) - self.num_bytes, own=self.num_bytes)

    def release(self) -> None:
        num_bytes, self.num_bytes = self.num_bytes, 0
        self._admission.release(self._tenant, num_bytes)


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
        self._held: Counter[str] = Counter()
        self.running = 0
        """The number of generations that run or are about to."""
        self.held_bytes = 0
        """The bytes of prompts that are held."""

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

    def hold(self, tenant: str, prompt: Prompt) -> HeldPrompt:
        """Holds the memory of a prompt.

        Raises RESOURCE_EXHAUSTED QUEUE_FULL at the bound on all prompts, in total or of this tenant.
        """
        return HeldPrompt(self, tenant, self.take(tenant, num_bytes_of(prompt)))

    def take(self, tenant: str, num_bytes: int, own: int = 0) -> int:
        """Takes so many bytes more for a prompt that has `own`, and returns their number.

        Raises QUEUE_FULL. A prompt that is alone is never too large.
        """
        left = self._limits.max_held_prompt_bytes - self.held_bytes
        bound = min(left, TENANT_SHARE * left - self._held[tenant])
        if num_bytes > bound and self.held_bytes > own:
            self._telemetry.refused.labels("prompt_bytes").inc()
            raise errors.prompts_held(num_bytes, self.held_bytes, self._limits.max_held_prompt_bytes)
        return self._take(tenant, num_bytes)

    def hold_anyway(self, tenant: str, prompt: Prompt) -> HeldPrompt:
        """Holds the memory of a prompt that cannot be refused."""
        return HeldPrompt(self, tenant, self._take(tenant, num_bytes_of(prompt)))

    def _take(self, tenant: str, num_bytes: int) -> int:
        self._held[tenant] += num_bytes
        self.held_bytes += num_bytes
        self._telemetry.prompts.held_bytes.set(self.held_bytes)
        return num_bytes

    def release(self, tenant: str, num_bytes: int) -> None:
        self._held[tenant] -= num_bytes
        self.held_bytes -= num_bytes
        if self._held[tenant] <= 0:
            del self._held[tenant]
        self._telemetry.prompts.held_bytes.set(self.held_bytes)

    def enter_unnamed(self) -> Place:
        """Returns a place for a generation whose tenant is not known yet.

        Raises QUEUE_FULL at the limit of running generations.
        """
        self._below(self.running, self._limits.max_running)
        return self._taken("")

    def _taken(self, tenant: str) -> Place:
        self._places[tenant] += 1
        self.running += 1
        return Place(self, tenant)

    def leave(self, tenant: str) -> None:
        _take_one(self._places, tenant)
        self.running -= 1

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


def num_bytes_of(prompt: Prompt) -> int:
    """Returns about how many bytes of memory a prompt takes."""
    match prompt:
        case ChatPrompt(messages):
            texts = sum(sys.getsizeof(message.content) - len(message.content) for message in messages)
            return texts + prompt.num_chars + _MESSAGE_BYTES * len(messages)
        case TextPrompt(text, suffix):
            return sys.getsizeof(text) + sys.getsizeof(suffix or "")
        case TokenPrompt(token_ids):
            return _TOKEN_BYTES * len(token_ids)


def estimated_tokens(prompt: Prompt) -> int:
    """Returns about how many tokens a prompt has: of ids exactly, of texts one for three bytes of UTF-8."""
    match prompt:
        case ChatPrompt(messages):
            return 1 + sum(_num_utf8(message.content) for message in messages) // _BYTES_PER_TOKEN
        case TextPrompt(text, suffix):
            return 1 + (_num_utf8(text) + _num_utf8(suffix or "")) // _BYTES_PER_TOKEN
        case TokenPrompt(token_ids):
            return len(token_ids)


def _num_utf8(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _take_one(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]
