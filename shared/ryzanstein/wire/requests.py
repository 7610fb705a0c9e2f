"""Requests of clients: messages, sampling parameters, chats and completions."""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from operator import attrgetter

from ryzanstein import errors
from ryzanstein.generation.prompts import (
    MAX_NAME_CHARS,
    MAX_TOOL_CALLS,
    PLAIN_TEMPLATE,
    ChatPrompt,
    Message,
    Prompt,
    Role,
    TemplateOptions,
    TextPrompt,
    TokenPrompt,
    ToolCall,
    user_key,
)
from ryzanstein.generation.request import (
    EXTENDED_PARAMS,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    NAMES,
    NO_DEFAULTS,
    GenerationRequest,
    SamplingDefaults,
    SamplingParams,
    in_bounds,
    valid_priority,
)
from ryzanstein.generation.tools import MAX_TOOLS, NO_TOOLS, Tool, ToolMode, Tools
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.wire.constraints import constraint_from_wire, constraint_to_wire

_ROLES = {
    inference.ROLE_SYSTEM: Role.SYSTEM,
    inference.ROLE_USER: Role.USER,
    inference.ROLE_ASSISTANT: Role.ASSISTANT,
    inference.ROLE_TOOL: Role.TOOL,
}
_MODES = {
    inference.TOOL_MODE_AUTO: ToolMode.AUTO,
    inference.TOOL_MODE_NONE: ToolMode.NONE,
    inference.TOOL_MODE_REQUIRED: ToolMode.REQUIRED,
    inference.TOOL_MODE_FUNCTION: ToolMode.NAMED,
}
_MODES_TO_WIRE = {mode: number for number, mode in _MODES.items()}
_ROLES_TO_WIRE = {role: number for number, role in _ROLES.items()}
_LISTS = ("stop", "stop_token_ids", "logit_bias", "bad_words", "allowed_token_ids", "constraint")
_OPTIONAL_PARAMS = tuple(name for name in SamplingParams.__dataclass_fields__ if name not in (*_LISTS, "unset"))
_optional = attrgetter(*_OPTIONAL_PARAMS)
_DEFAULTS = SamplingParams()


def message_from_wire(message: inference.Message, field: str) -> Message:
    role = _ROLES.get(message.role)
    if role is None:
        raise errors.invalid(f"{field}.role", "must be ROLE_SYSTEM, ROLE_USER, ROLE_ASSISTANT or ROLE_TOOL", message.role)
    _at_most(MAX_TOOL_CALLS, message.tool_calls, f"{field}.tool_calls", "calls")
    calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls)
    known = Message(role, message.content, calls, message.tool_call_id, message.name, message.reasoning)
    known.validate(field)
    return known


@dataclass(frozen=True, slots=True)
class MostParts:
    """The most parts that a prompt may have: converting each of them holds the event loop."""

    messages: int = 65_536
    token_ids: int = 4 * 2**20


_ANY = MostParts()


def _at_most(bound: int, values: Sized, field: str, what: str = "entries") -> None:
    if len(values) > bound:
        raise errors.invalid(field, f"must have at most {bound} {what}", len(values))


def messages_from_wire(messages: Sequence[inference.Message], most: MostParts = _ANY) -> tuple[Message, ...]:
    _at_most(most.messages, messages, "messages", "messages")
    return tuple(message_from_wire(message, f"messages[{i}]") for i, message in enumerate(messages))


def message_to_wire(message: Message) -> inference.Message:
    if message.is_plain:
        return inference.Message(role=_ROLES_TO_WIRE[message.role], content=message.content)
    return inference.Message(
        role=_ROLES_TO_WIRE[message.role],
        content=message.content,
        tool_calls=[inference.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in message.tool_calls],
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning=message.reasoning,
    )


def tools_from_wire(wire: inference.ChatRequest | inference.Conversation) -> Tools:
    """Returns the validated tools of a request."""
    _at_most(MAX_TOOLS, wire.tools, "tools", "tools")
    if not wire.tools and not wire.HasField("tool_choice") and not wire.HasField("parallel_tool_calls"):
        return NO_TOOLS
    mode = _MODES.get(wire.tool_choice.mode, ToolMode.AUTO)
    if wire.HasField("tool_choice") and wire.tool_choice.mode not in _MODES:
        raise errors.invalid("tool_choice.mode", "must be one of ToolMode but TOOL_MODE_UNSPECIFIED", wire.tool_choice.mode)
    tools = Tools(
        tuple(Tool(tool.name, tool.description, tool.parameters, tool.strict) for tool in wire.tools),
        mode,
        wire.tool_choice.name,
        wire.parallel_tool_calls if wire.HasField("parallel_tool_calls") else True,
    )
    tools.validate()
    return tools


def conversation_from_wire(conversation: inference.Conversation, most: MostParts = _ANY) -> ChatPrompt:
    return ChatPrompt(messages_from_wire(conversation.messages, most), tools=tools_from_wire(conversation))


def conversation_to_wire(prompt: ChatPrompt) -> inference.Conversation:
    tools = prompt.tools
    conversation = inference.Conversation(messages=[message_to_wire(message) for message in prompt.messages])
    if tools == NO_TOOLS:
        return conversation
    for tool in tools.offered:
        offered = conversation.tools.add(name=tool.name, description=tool.description, parameters=tool.parameters)
        offered.strict = tool.strict
    conversation.tool_choice.mode = _MODES_TO_WIRE[tools.mode]
    conversation.tool_choice.name = tools.named
    conversation.parallel_tool_calls = tools.parallel
    return conversation


def sampling_from_wire(wire: inference.SamplingParams) -> SamplingParams:
    """Returns validated parameters; absent fields have their defaults."""
    _at_most(MAX_STOP_STRINGS, wire.stop, "sampling.stop")
    _at_most(MAX_STOP_TOKEN_IDS, wire.stop_token_ids, "sampling.stop_token_ids")
    _at_most(MAX_LOGIT_BIAS, wire.logit_bias, "sampling.logit_bias")
    _at_most(MAX_BAD_WORDS, wire.bad_words, "sampling.bad_words")
    _at_most(MAX_ALLOWED_TOKEN_IDS, wire.allowed_token_ids, "sampling.allowed_token_ids")
    given = {field.name: value for field, value in wire.ListFields() if field.name not in _LISTS}
    if any(isinstance(value, float) and not math.isfinite(value) for value in given.values()):
        bad = next(k for k, v in given.items() if isinstance(v, float) and not math.isfinite(v))
        raise errors.invalid(f"sampling.{bad}", "must be a finite number", given[bad])
    if given.get("top_k") == 0:
        raise errors.invalid("sampling.top_k", "must be at least 1; omit it for no limit", 0)
    params = SamplingParams(
        **given,
        stop=tuple(wire.stop),
        stop_token_ids=tuple(wire.stop_token_ids),
        logit_bias=tuple(sorted(wire.logit_bias.items())),
        constraint=constraint_from_wire(wire.constraint) if wire.HasField("constraint") else None,
        bad_words=tuple(wire.bad_words),
        allowed_token_ids=tuple(wire.allowed_token_ids),
        unset=frozenset(NAMES).difference(given),
    )
    params.validate()
    return params


def sampling_defaults_to_wire(defaults: SamplingDefaults) -> inference.SamplingDefaults | None:
    """Returns None for a model that has none."""
    if defaults is NO_DEFAULTS:  # of most beats
        return None
    return inference.SamplingDefaults(**defaults.given) if defaults.given else None  # type: ignore[arg-type]


def sampling_defaults_from_wire(wire: inference.SamplingDefaults) -> SamplingDefaults:
    """Returns the values that a request may have; a node's others are ignored."""
    given = {name: getattr(wire, name) for name in NAMES if wire.HasField(name)}  # type: ignore[arg-type]
    return SamplingDefaults(**{name: value for name, value in given.items() if in_bounds(name, value)})


def sampling_to_wire(params: SamplingParams) -> inference.SamplingParams:
    wire = inference.SamplingParams(
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        logit_bias=dict(params.logit_bias),
        bad_words=params.bad_words,
        allowed_token_ids=params.allowed_token_ids,
    )
    for name, value in zip(_OPTIONAL_PARAMS, _optional(params), strict=True):
        if value is not None and not (name == "top_k" and value == 0) and not _unsaid(name, value):
            setattr(wire, name, value)
    if params.constraint is not None:
        wire.constraint.CopyFrom(constraint_to_wire(params.constraint))
    return wire


def _unsaid(name: str, value: object) -> bool:
    """Returns whether a parameter that earlier versions do not know asks for nothing, and is left out."""
    return name in EXTENDED_PARAMS and value == getattr(_DEFAULTS, name)


def template_from_wire(wire: inference.TemplateOptions) -> TemplateOptions:
    """Returns validated options."""
    adds = wire.add_generation_prompt if wire.HasField("add_generation_prompt") else not wire.continue_final_message
    options = TemplateOptions(wire.variables, adds, wire.continue_final_message)
    options.validate()
    return options


def template_to_wire(options: TemplateOptions) -> inference.TemplateOptions | None:
    """Returns the options; None for the defaults, which older nodes know."""
    if options == PLAIN_TEMPLATE:
        return None
    return inference.TemplateOptions(
        variables=options.variables,
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continues,
    )


def name_from_wire(value: str, field: str) -> str:
    """Returns a session id or model name of at most 128 characters."""
    if len(value) > MAX_NAME_CHARS:
        raise errors.invalid(field, f"must have at most {MAX_NAME_CHARS} characters", len(value))
    return value


MAX_SCOPE_CHARS = 256


def cache_scope_from_wire(value: str, field: str = "cache_scope") -> str:
    """Returns a cache scope: a tenant, or the name of a group behind a prefix."""
    if len(value) > MAX_SCOPE_CHARS:
        raise errors.invalid(field, f"must have at most {MAX_SCOPE_CHARS} characters", len(value))
    return value


def chat_from_wire(chat: inference.ChatRequest, most: MostParts = _ANY) -> GenerationRequest:
    if not chat.messages:
        raise errors.invalid("messages", "must have at least one message")
    return GenerationRequest(
        model=name_from_wire(chat.model, "model"),
        prompt=ChatPrompt(
            messages_from_wire(chat.messages, most), template_from_wire(chat.template_options), tools_from_wire(chat)
        ),
        sampling=sampling_from_wire(chat.sampling),
        session_id=name_from_wire(chat.session_id, "session_id"),
        user=user_key(chat.user, "user"),
        priority=valid_priority(chat.priority),
    )


def complete_from_wire(complete: inference.CompleteRequest, most: MostParts = _ANY) -> GenerationRequest:
    prompt: Prompt
    if complete.WhichOneof("prompt") == "token_ids":
        _at_most(most.token_ids, complete.token_ids.ids, "token_ids", "ids")
        prompt = TokenPrompt(tuple(complete.token_ids.ids))
        if not prompt.token_ids:
            raise errors.invalid("token_ids", "must have at least one id")
        if complete.HasField("suffix"):
            raise errors.invalid("suffix", "needs a prompt of text")
    else:
        prompt = TextPrompt(complete.text, complete.suffix if complete.HasField("suffix") else None)
        if not complete.text and prompt.suffix is None:
            raise errors.invalid("prompt", "text or token_ids must be given and must not be empty")
    return GenerationRequest(
        model=name_from_wire(complete.model, "model"),
        prompt=prompt,
        sampling=sampling_from_wire(complete.sampling),
        user=user_key(complete.user, "user"),
        priority=valid_priority(complete.priority),
    )
