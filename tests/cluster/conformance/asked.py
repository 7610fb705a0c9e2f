"""What the conformance suite asks of every face, and what it compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ryzanstein.errors import Code


@dataclass(frozen=True)
class Asked:
    """A chat, or a completion where `prompt` is given. `sampling` has the names of gRPC's SamplingParams."""

    text: str = "Count from 1 to 20."
    prompt: str | tuple[int, ...] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    session_id: str = ""
    user: str = ""
    tenant: str = ""
    key: str = ""
    schema: Mapping[str, Any] | None = None
    """A JSON schema of the answer."""
    tool: Mapping[str, Any] | None = None
    """A function with `name` and `parameters`, which must be called."""
    timeout_ms: int | None = None
    cancel_on_disconnect: bool = False

    @property
    def headers(self) -> dict[str, str]:
        """Those of HTTP, without the tenant."""
        given = {
            "Idempotency-Key": self.key,
            "X-Request-Timeout-Ms": "" if self.timeout_ms is None else str(self.timeout_ms),
            "X-Cancel-On-Disconnect": "true" if self.cancel_on_disconnect else "",
        }
        return {name: value for name, value in given.items() if value}

    @property
    def url(self) -> str:
        return "/v1/chat/completions" if self.prompt is None else "/v1/completions"

    def body(self, **more: Any) -> dict[str, Any]:
        """That of HTTP."""
        sampling = {name: list(value) if isinstance(value, tuple) else value for name, value in self.sampling.items()}
        logprobs = sampling.pop("logprobs", None)
        if logprobs is not None:
            chat = {"logprobs": True, "top_logprobs": logprobs}
            sampling |= chat if self.prompt is None else {"logprobs": logprobs}
        wording: dict[str, Any] = {"messages": [{"role": "user", "content": self.text}]} if self.text else {"messages": []}
        if self.prompt is not None:
            wording = {"prompt": self.prompt if isinstance(self.prompt, str) else list(self.prompt)}
        if self.schema is not None:
            form = {"name": "answer", "strict": True, "schema": self.schema}
            wording["response_format"] = {"type": "json_schema", "json_schema": form}
        if self.tool is not None:
            wording |= {"tools": [{"type": "function", "function": self.tool}], "tool_choice": "required"}
        named = {"model": self.model, "session_id": self.session_id, "user": self.user}
        return {**wording, **sampling, **{name: value for name, value in named.items() if value}, **more}


@dataclass
class Heard:
    """One choice as its reader saw it. `rows` are the log probabilities: token, value, and the alternatives' tokens.

    `calls` are the functions that it calls: name and arguments.
    """

    text: str = ""
    reason: str = ""
    rows: list[tuple[str, float, tuple[str, ...]]] = field(default_factory=list)
    calls: list[list[str]] = field(default_factory=list)
    next_index: int = 0

    def add_call(self, index: int, name: str, arguments: str) -> None:
        """Adds a piece of a call."""
        if index == len(self.calls):
            self.calls.append(["", ""])
        self.calls[index][0] += name
        self.calls[index][1] += arguments


@dataclass
class Reply:
    """An answer, or as much of it as was read."""

    generation: str = ""
    choices: dict[int, Heard] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def of(self, choice: int) -> Heard:
        return self.choices.setdefault(choice, Heard())

    @property
    def num_read(self) -> int:
        return sum(heard.next_index for heard in self.choices.values())


@dataclass
class Refusal(Exception):
    """An error as its client sees it. `field` is as HTTP names it."""

    code: Code
    reason: str
    field: str
    metadata: Mapping[str, str]
    retryable: bool
    message: str = ""

    @property
    def compared(self) -> tuple[Code, str, str, frozenset[str], bool]:
        # A prompt that is too long is to OpenAI's clients one of `messages`, whichever field is the reason.
        field = "" if self.reason == "CONTEXT_TOO_LONG" else self.field
        return self.code, self.reason, field, frozenset(self.metadata) - {"field"}, self.retryable


class Driver(Protocol):
    """A client of one face. Every method raises Refusal."""

    streams: bool

    def ask(self, asked: Asked) -> Reply: ...

    def begin(self, asked: Asked, num_tokens: int) -> Reply:
        """Reads so many tokens and then disconnects. `streams` only."""
        ...

    def attach(self, reply: Reply) -> Reply:
        """Reads the rest, on top of what was read. `streams` only."""
        ...

    def cancelled(self, asked: Asked, num_tokens: int) -> Reply:
        """Reads so many tokens, cancels, and reads to the end. `streams` only."""
        ...
