"""Generations: the frozen values that travel from a face to a node and back. Standard library only.

A generation has `n` choices; each choice is a sequence of tokens with the indices 0, 1, 2, ...
Everything that determines the rest of an answer is data here (prompt and generated tokens
separately, seed, parameters), so that any node can continue it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from ryzanstein import errors
from ryzanstein.constraints import Constraint
from ryzanstein.open_enum import OpenEnum
from ryzanstein.tools import NO_TOOLS, Tools, valid_function_name

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_CHOICES = 16
MAX_NAME_CHARS = 128
MAX_PRIORITY = 10
MAX_TOOL_CALLS = 128
MAX_CALL_ID_CHARS = 128
MAX_AUTHOR_CHARS = 64
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 64
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_TEMPLATE_VARIABLES_CHARS = 4096
MAX_PROMPT_SCORES = 262_144
"""Log probabilities of one prompt: its tokens, times one and the alternatives of each."""
EXTENDED = "extended-parameters"
"""The feature of nodes that know everything in `SamplingParams` from `bad_words` on, and `TemplateOptions`."""
TOOLS = "tools"
"""The feature of nodes that know tools, and messages that are not plain."""
CONSTRAINTS = "constraints"
"""The feature of nodes that enforce `SamplingParams.constraint`."""
PROMPT_CUTS = "prompt-cuts"
"""The feature of nodes that know `SamplingParams.keep_prompt_head`."""
KNOWN_FEATURES = frozenset({EXTENDED, TOOLS, CONSTRAINTS, PROMPT_CUTS})
"""All features that this version knows."""

# The HTTP header and the gRPC metadata key that name the tenant.
TENANT_ID = "x-tenant-id"
_VISIBLE = re.compile(r"[\x21-\x7e]+")
_AUTHOR = re.compile(r"[^\s<|\\/>]+")


class Role(Enum):
    """The author of a message, as chat templates spell it."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function. `arguments` is JSON as the model wrote it; it may be incomplete."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a conversation.

    `tool_calls` and `reasoning` are the assistant's. `tool_call_id` names the call of which a
    tool's message is the result. `name` tells authors of one role apart. `validate` enforces this,
    and the bounds of `Message` in inference.proto.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether it has only what messages of every version have: a content, and a role but a tool's."""
        return self.role is not Role.TOOL and not (self.tool_calls or self.tool_call_id or self.name or self.reasoning)

    @property
    def num_chars(self) -> int:
        """The characters of all its texts."""
        if self.is_plain:
            return len(self.content)
        calls = sum(len(call.id) + len(call.name) + len(call.arguments) for call in self.tool_calls)
        return len(self.content) + len(self.tool_call_id) + len(self.name) + len(self.reasoning) + calls

    def validate(self, field: str) -> None:
        """Raises INVALID_ARGUMENT, which names the first part of the message at `field` that is wrong."""
        if self.is_plain:
            return
        for part, role in (("tool_calls", Role.ASSISTANT), ("reasoning", Role.ASSISTANT), ("tool_call_id", Role.TOOL)):
            if getattr(self, part) and self.role is not role:
                raise errors.invalid(f"{field}.{part}", f"is only for the role {role.value}", self.role.value)
        if self.role is Role.TOOL:
            _check_call_id(self.tool_call_id, f"{field}.tool_call_id")
        if self.name and (len(self.name) > MAX_AUTHOR_CHARS or not _AUTHOR.fullmatch(self.name)):
            bound = f"must have 1 to {MAX_AUTHOR_CHARS} characters, no white space and none of < | \\ / >"
            raise errors.invalid(f"{field}.name", bound, self.name[:64])
        if len(self.tool_calls) > MAX_TOOL_CALLS:
            raise errors.invalid(f"{field}.tool_calls", f"must have at most {MAX_TOOL_CALLS} calls", len(self.tool_calls))
        for i, call in enumerate(self.tool_calls):
            _check_call_id(call.id, f"{field}.tool_calls[{i}].id")
            valid_function_name(call.name, f"{field}.tool_calls[{i}].function.name")


def _check_call_id(call_id: str, field: str) -> None:
    if len(call_id) > MAX_CALL_ID_CHARS or not _VISIBLE.fullmatch(call_id):
        raise errors.invalid(field, f"must have 1 to {MAX_CALL_ID_CHARS} visible ASCII characters", call_id[:64])


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What a chat template is given besides the messages.

    `variables` is a JSON object, or empty. With `continues` the last message is the beginning of
    the answer.
    """

    variables: str = ""
    add_generation_prompt: bool = True
    continues: bool = False

    def validate(self) -> None:
        """Raises INVALID_ARGUMENT, which names the field."""
        if self.variables:
            template_variables(self.variables)
        if self.continues and self.add_generation_prompt:
            raise errors.invalid("continue_final_message", "requires add_generation_prompt: false", True)


PLAIN_TEMPLATE = TemplateOptions()
_TEMPLATES_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


def template_variables(text: str) -> dict[str, Any]:
    """Returns the variables of a chat template. Raises INVALID_ARGUMENT for anything but their JSON."""
    field = "chat_template_kwargs"
    if len(text) > MAX_TEMPLATE_VARIABLES_CHARS:
        raise errors.invalid(field, f"must have at most {MAX_TEMPLATE_VARIABLES_CHARS} characters of JSON", len(text))
    try:
        variables = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        raise errors.invalid(field, "must be a JSON object") from None
    if not isinstance(variables, dict):
        raise errors.invalid(field, "must be a JSON object")
    for name in variables:
        if not name.isidentifier() or name in _TEMPLATES_OWN:
            raise errors.invalid(f"{field}.{name[:64]}", "is not a variable that a request may set")
    return variables


def with_variable(text: str, name: str, value: str) -> str:
    """Returns the variables with one more. Raises as `template_variables`."""
    return json.dumps(template_variables(text) | {name: value}, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, to which the node applies its chat template, and what the assistant may call."""

    messages: tuple[Message, ...]
    template: TemplateOptions = PLAIN_TEMPLATE
    tools: Tools = NO_TOOLS

    @property
    def is_plain(self) -> bool:
        """Whether it has only what prompts of every version have."""
        return self.tools == NO_TOOLS and all(message.is_plain for message in self.messages)

    @property
    def num_chars(self) -> int:
        return sum(message.num_chars for message in self.messages) + self.tools.num_chars


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A text that is continued as is; with a `suffix` up to what stands after the answer.

    A router has the latter made of the model's own tokens before anything is generated.
    """

    text: str
    suffix: str | None = None


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A tokenized text that is continued as is."""

    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters by which tokens are chosen.

    `validate` enforces the bounds of `SamplingParams` in inference.proto. `seed` is None only
    before the router has chosen one. `max_tokens` None means all that is left of the context.
    `allowed_token_ids` empty allows all. `truncate_prompt_tokens` keeps so many of the prompt's last
    tokens. With `keep_prompt_head` a prompt that does not fit is cut, see inference.proto.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    n: int = 1
    ignore_eos: bool = False
    constraint: Constraint | None = None
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    keep_prompt_head: int | None = None

    def validate(self) -> None:
        """Raises INVALID_ARGUMENT, which names the first field out of its bounds."""
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise errors.invalid(f"sampling.{name}", f"must be in [{low}, {high}]", value)
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) <= 0:
                raise errors.invalid(f"sampling.{name}", "must be greater than 0", getattr(self, name))
        if self.truncate_prompt_tokens is not None and (self.keep_prompt_head or 0) >= self.truncate_prompt_tokens:
            bound = f"must be less than truncate_prompt_tokens ({self.truncate_prompt_tokens})"
            raise errors.invalid("sampling.keep_prompt_head", bound, self.keep_prompt_head)
        self._validate_lists()
        if self.constraint is not None:
            self.constraint.validate()

    @property
    def is_extended(self) -> bool:
        """Whether it has a parameter that only nodes with the feature `EXTENDED` know."""
        return any(getattr(self, name) != getattr(_DEFAULTS, name) for name in EXTENDED_PARAMS)

    def _validate_lists(self) -> None:
        for name, bound in _LENGTHS:
            if len(getattr(self, name)) > bound:
                raise errors.invalid(f"sampling.{name}", f"must have at most {bound} entries", len(getattr(self, name)))
        for name, most in (("stop", MAX_STOP_CHARS), ("bad_words", MAX_BAD_WORD_CHARS)):
            _check_texts(f"sampling.{name}", getattr(self, name), most)
        for _, bias in self.logit_bias:
            if not -100 <= bias <= 100:
                raise errors.invalid("sampling.logit_bias", "each value must be in [-100, 100]", bias)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise errors.invalid("sampling.min_tokens", f"must be at most max_tokens ({self.max_tokens})", self.min_tokens)


def _check_texts(field: str, texts: Sequence[str], most: int) -> None:
    for text in texts:
        if not 1 <= len(text) <= most:
            raise errors.invalid(field, f"each string must have 1 to {most} characters", len(text))


EXTENDED_PARAMS = (
    "bad_words",
    "allowed_token_ids",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "prompt_logprobs",
    "truncate_prompt_tokens",
)
_DEFAULTS = SamplingParams()
_UINT32 = 2**32 - 1
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0, 2),
    ("top_p", 0, 1),
    ("top_k", 0, _UINT32),
    ("min_p", 0, 1),
    ("repetition_penalty", 0, 2),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("seed", 0, 2**64 - 1),
    ("max_tokens", 1, _UINT32),
    ("min_tokens", 0, _UINT32),
    ("logprobs", 0, MAX_LOGPROBS),
    ("n", 1, MAX_CHOICES),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
    ("truncate_prompt_tokens", 1, _UINT32),
    ("keep_prompt_head", 0, _UINT32),
)
_LENGTHS = (
    ("stop", MAX_STOP_STRINGS),
    ("stop_token_ids", MAX_STOP_TOKEN_IDS),
    ("logit_bias", MAX_LOGIT_BIAS),
    ("bad_words", MAX_BAD_WORDS),
    ("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS),
)


def valid_priority(priority: int) -> int:
    """Returns the priority. Raises INVALID_ARGUMENT outside [-MAX_PRIORITY, MAX_PRIORITY]."""
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise errors.invalid("priority", f"must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}]", priority)
    return priority


def valid_tenant(given: str, user: str) -> str:
    """Returns who is charged: the tenant that the caller's gateway names, else the user.

    Raises INVALID_ARGUMENT for a tenant name of over 128 characters or with other characters than
    visible ASCII.
    """
    if not given:
        return user
    if len(given) > MAX_NAME_CHARS or not _VISIBLE.fullmatch(given):
        raise errors.invalid(TENANT_ID, f"must have 1 to {MAX_NAME_CHARS} visible ASCII characters", given[:64])
    return given


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


@dataclass(frozen=True, slots=True)
class ChoiceProgress:
    """What one choice has generated so far. `finished` choices must not run again."""

    token_ids: tuple[int, ...] = ()
    finished: bool = False


@dataclass(frozen=True, slots=True)
class NodePlace:
    """A node, and where it is reached: host:port."""

    node_id: str
    address: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt to run a generation on one node.

    `attempt` is a fencing number. `generated` has one entry per choice. `accepted_before`: an
    earlier node had accepted the generation. `backup`: where it goes next if the node fails.
    `previous`: a node that may have pages of the conversation's earlier turns. `conversation` is the
    same for all its turns; empty outside of one.
    """

    generation_id: str
    attempt: int
    request: GenerationRequest
    generated: tuple[ChoiceProgress, ...]
    accepted_before: bool = False
    backup: NodePlace | None = None
    previous: NodePlace | None = None
    conversation: bytes = b""


class FinishReason(OpenEnum):
    """Why a choice ended, with the numbers of inference.proto.

    UNSPECIFIED: a reason that only a newer node knows. TOOL_CALLS is how a face shows a STOP after
    calls of functions: no node and no log has it.
    """

    UNSPECIFIED = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    TOOL_CALLS = 4


class TopLogprob(NamedTuple):
    """One of the likeliest tokens. `text` and `token_bytes` are as in `TokenLogprobs`."""

    token_id: int
    text: str
    logprob: float
    token_bytes: bytes | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities of a token and of the likeliest tokens, likeliest first.

    `text` is the token alone, or the name of a special token. `token_bytes` is what the token adds
    to the text: part of a character for some tokens, nothing for special ones. The bytes of all
    tokens together are the text before a stop string cut it. None: the node's version does not
    report it.
    """

    logprob: float
    top: tuple[TopLogprob, ...] = ()
    text: str | None = None
    token_bytes: bytes | None = None


class Token(NamedTuple):
    """One generated token. `text` is what became certain with it, often empty for half a character.

    It is a tuple, like `Delta`: there is one for each token of each frame, and a frozen dataclass
    takes three times as long to create.
    """

    token_id: int
    text: str
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts over all choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_prompt_tokens: int = 0
    omitted_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ReplyStyle:
    """How a model writes what is not content, as a node reads it from the chat template.

    `calls` is the family in which it calls functions, empty if the request offers none. `thinking`:
    reasoning stands between `<think>` and `</think>`; `opened`: the prompt ends with the first.
    """

    calls: str = ""
    thinking: bool = False
    opened: bool = False


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How the text of a generation's answers is read, see `ryzanstein.replies`.

    Besides what `ReplyStyle` says: the functions that may be called, and how many calls count as
    such. `named`: the request demanded one function, so that its call is a plain end.
    """

    calls: str = ""
    thinking: bool = False
    opened: bool = False
    tools: tuple[str, ...] = ()
    max_calls: int = MAX_TOOL_CALLS
    named: bool = False


@dataclass(frozen=True, slots=True)
class Started:
    """The event that a node has accepted the generation.

    `omitted_prompt_tokens` were left out of a prompt that did not fit.
    `reply` None: the text of its answers is content alone.
    """

    generation_id: str
    model: str
    node_id: str
    prompt_tokens: int
    created: int = 0
    shown_as: str = ""
    reply: ReplyFormat | None = None
    omitted_prompt_tokens: int = 0


class PromptToken(NamedTuple):
    """One token of a prompt. `logprob` is None for the first, which nothing precedes."""

    token_id: int
    text: str
    logprob: float | None
    top: tuple[TopLogprob, ...] = ()


class PromptScores(NamedTuple):
    """Tokens of the prompt with their log probabilities: first_index, first_index + 1, ..."""

    first_index: int
    tokens: Sequence[PromptToken]


class Delta(NamedTuple):
    """New tokens of one choice: first_index, first_index + 1, ..."""

    choice: int
    first_index: int
    tokens: Sequence[Token]
    node_id: str

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one choice."""

    choice: int
    reason: FinishReason
    usage: Usage


GenerationEvent = Started | PromptScores | Delta | Finished
