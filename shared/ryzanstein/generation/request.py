"""What a client asks for."""

from __future__ import annotations

from dataclasses import dataclass

from ryzanstein import errors
from ryzanstein.generation.features import CONSTRAINTS, EXTENDED, PROMPT_CUTS, TOOLS
from ryzanstein.generation.prompts import ChatPrompt, Prompt
from ryzanstein.generation.sampling import SamplingParams
from ryzanstein.generation.template_options import PLAIN_TEMPLATE

MAX_PRIORITY = 10


def valid_priority(priority: int) -> int:
    """Returns the priority. Raises INVALID_ARGUMENT outside [-MAX_PRIORITY, MAX_PRIORITY]."""
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise errors.invalid("priority", f"must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}]", priority)
    return priority


@dataclass(frozen=True, slots=True)
class RequestKey:
    """A key that identifies a request that is sent again.

    `name` is a digest of tenant and key, `body` a digest of the request as it was sent.
    """

    name: str
    body: bytes


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A client's request, as faces pass it to the router's core and the router to a node.

    `deadline` is Unix time in seconds by `clock.unix_s`; None: the client waits forever. Tenants
    share fairly among requests of one `priority`; "" is a tenant like any other. `tenant_named`: the
    caller's gateway named it, so it bounds what the request finds. `traceparent` is
    W3C trace context or empty. `last_node` answered the session's previous turn, according to the
    session store: a hint where its KV cache is. `request_id` traces one call. `key` stays the same
    when a client sends the request again. `detached`: the generation runs to its end even without a
    reader. `created` is when it was admitted, in whole seconds of Unix time; 0: not yet. `shown_as`
    is how the face that took it shows the answer: the faces alone know what it means. `kept`: outside
    of a session, but what is said here is kept, and a later request may go on from it. `never_cut`: its
    face shows the prompt, so no default of the router's leaves out a part of it.
    """

    model: str
    prompt: Prompt
    sampling: SamplingParams
    session_id: str = ""
    user: str = ""
    deadline: float | None = None
    priority: int = 0
    tenant: str = ""
    tenant_named: bool = False
    request_id: str = ""
    traceparent: str = ""
    last_node: str = ""
    key: RequestKey | None = None
    detached: bool = False
    created: int = 0
    shown_as: str = ""
    kept: bool = False
    never_cut: bool = False

    @property
    def is_constrained(self) -> bool:
        """Whether its answer must have a form that a node enforces token by token."""
        return self.sampling.constraint is not None or (isinstance(self.prompt, ChatPrompt) and self.prompt.tools.must)

    @property
    def features(self) -> frozenset[str]:
        """The features that a node needs to run it: a node without one would ignore a part of it."""
        needed = {EXTENDED} if self.sampling.is_extended else set()
        needed |= {CONSTRAINTS} if self.is_constrained else set()
        needed |= {PROMPT_CUTS} if self.sampling.keep_prompt_head is not None else set()
        if isinstance(self.prompt, ChatPrompt):
            needed |= set() if self.prompt.template == PLAIN_TEMPLATE else {EXTENDED}
            needed |= set() if self.prompt.is_plain else {TOOLS}
        return frozenset(needed)
