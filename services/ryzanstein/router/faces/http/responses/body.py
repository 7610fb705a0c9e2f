"""The body of POST /v1/responses, and the request that it makes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from ryzanstein import errors
from ryzanstein.constraints import FIELD
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.prompts import ChatPrompt, Message, Role, TemplateOptions
from ryzanstein.generation.request import MAX_LOGPROBS, GenerationRequest
from ryzanstein.generation.tools import MAX_TOOLS, NO_TOOLS, Tool, ToolMode, Tools
from ryzanstein.router.faces.http.responses.input_items import InputItem, spoken_in
from ryzanstein.router.faces.openai.requests.prompts import base_request, name_of, with_effort
from ryzanstein.router.faces.openai.requests.sampling import sampling_params, whole
from ryzanstein.router.faces.openai.requests.schemas import Body, GenerationOptions, Whole, refuse
from ryzanstein.router.faces.openai.requests.tools import without_format
from ryzanstein.router.faces.origin import RequestOrigin

MAX_METADATA = 16
MAX_METADATA_CHARS = 512
_ABSENT: Any = None
_PLACE = re.compile(r"tools\[(\d+)\]")
# Our names of fields, and what this body calls them.
_NAMES = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("sampling.max_tokens", "max_output_tokens"),
    ("tool_choice.function", "tool_choice"),
)
# Each field with the values that request nothing.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "max_tool_calls": (),
        "moderation": (),
        "prompt": (),
    }
)
_STREAM_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType({"include_obfuscation": (False,)})
# Details of items that no response of ours has: who asks for them gets none, and misses none.
_INCLUDED = frozenset(
    {
        *("reasoning.encrypted_content", "web_search_call.action.sources", "web_search_call.results"),
        *("file_search_call.results", "code_interpreter_call.outputs", "computer_call_output.output.image_url"),
        *("message.input_image.image_url",),
    }
)


class ReasoningOptions(msgspec.Struct, frozen=True):
    """How much the model is to think. Summaries of it are not made."""

    effort: str | None = None


class FunctionTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may call. Tools of other types, which only OpenAI's servers run, are left out."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: Raw = _ABSENT
    strict: bool | None = None


class FunctionChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """The function that the model must call."""

    type: str
    name: str | None = None


class TextFormat(Body, frozen=True):
    """The form of the answer: any text, any JSON object, or JSON that a schema admits. Schemas are always enforced."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: Raw = _ABSENT
    strict: bool | None = None


class ResponseText(Body, frozen=True):
    """What the text of an answer is like."""

    format: TextFormat | None = None
    verbosity: Raw = _ABSENT


class ResponseStreamOptions(Body, frozen=True):
    """What a stream is like."""

    include_obfuscation: Raw = _ABSENT


class ResponsesRequest(Body, frozen=True, kw_only=True):
    """POST /v1/responses."""

    model: str | None = None
    input: str | list[InputItem]
    include: list[str] | None = None
    instructions: str | None = None
    max_output_tokens: Whole | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=MAX_METADATA)] | None = None
    previous_response_id: str | None = None
    reasoning: ReasoningOptions | None = None
    service_tier: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    temperature: float | None = None
    text: ResponseText | None = None
    top_p: float | None = None
    tool_choice: str | FunctionChoice | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Whole | None = None
    truncation: str | None = None
    user: str | None = None
    # Refused unless they request nothing.
    background: Raw = _ABSENT
    context_management: Raw = _ABSENT
    conversation: Raw = _ABSENT
    max_tool_calls: Raw = _ABSENT
    moderation: Raw = _ABSENT
    prompt: Raw = _ABSENT
    # Labels and hints: these never change an answer. docs/reference/http.md lists them.
    prompt_cache_key: Raw = _ABSENT
    prompt_cache_options: Raw = _ABSENT
    prompt_cache_retention: Raw = _ABSENT
    safety_identifier: Raw = _ABSENT
    client_metadata: Raw = _ABSENT
    litellm_metadata: Raw = _ABSENT
    request_id: Raw = _ABSENT


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for. `said` are the new messages; `request` has no prompt yet."""

    body: ResponsesRequest
    request: GenerationRequest
    new_messages: tuple[Message, ...]
    template: TemplateOptions
    tools: Tools

    @property
    def stored(self) -> bool:
        return self.body.store is not False

    def with_history(self, history: Sequence[Message]) -> ChatPrompt:
        """Returns the prompt: instructions, what was said before, and what is new."""
        instructions = (Message(Role.SYSTEM, self.body.instructions),) if self.body.instructions else ()
        return ChatPrompt((*instructions, *history, *self.new_messages), self.template, self.tools)


def refers(body: ResponsesRequest) -> bool:
    """Returns whether its input refers to items of responses that are kept."""
    return isinstance(body.input, list) and any(item.refers for item in body.input)


def asked(body: ResponsesRequest, headers: Mapping[str, str], origin: RequestOrigin, max_items: int) -> Asked:
    """Returns what a body asks for. Raises INVALID_ARGUMENT that names the field."""
    with naming_fields(body):
        return _asked(body, headers, origin, max_items)


def _asked(body: ResponsesRequest, headers: Mapping[str, str], origin: RequestOrigin, max_items: int) -> Asked:
    refuse(body, _UNSUPPORTED, "")
    if body.stream_options is not None:
        refuse(body.stream_options, _STREAM_UNSUPPORTED, "stream_options.")
    for i, detail in enumerate(body.include or ()):
        if detail not in _INCLUDED:
            raise errors.invalid(f"include[{i}]", "is not supported", detail[:64])
    if body.truncation not in (None, "auto", "disabled"):
        raise errors.invalid("truncation", "must be auto or disabled", body.truncation[:64])
    _check_metadata(body.metadata or {})
    top = whole("top_logprobs", body.top_logprobs)
    if top:
        raise errors.invalid("top_logprobs", "is not supported here; /v1/chat/completions has it", min(top, MAX_LOGPROBS))
    name_of(body.previous_response_id or "", "previous_response_id")
    effort = body.reasoning.effort if body.reasoning is not None else None
    options = GenerationOptions(
        model=body.model,
        temperature=body.temperature,
        top_p=body.top_p,
        user=body.user,
        service_tier=body.service_tier,
        response_format=_response_format(body.text),
    )
    tools = _tools(body)
    sampling = without_format(sampling_params(options, _max_tokens(body), None), tools)
    if body.truncation == "auto":
        sampling = replace(sampling, keep_prompt_head=0)
    new_messages = spoken_in(body.input, max_items)
    request = base_request(options, ChatPrompt(new_messages), sampling, headers, origin)
    return Asked(body, request, new_messages, TemplateOptions(with_effort("", effort)), tools)


def _tools(body: ResponsesRequest) -> Tools:
    """Returns what may be called. Raises INVALID_ARGUMENT that names the field."""
    choice, named = body.tool_choice, ""
    if isinstance(choice, FunctionChoice):
        if choice.type != "function":
            raise errors.invalid("tool_choice.type", "must be function", choice.type[:64])
        mode, named = ToolMode.NAMED, choice.name or ""
    elif choice not in (None, "auto", "none", "required"):
        raise errors.invalid("tool_choice", "must be one of auto, none, required, or name a function", choice[:64])
    else:
        mode = ToolMode(choice or "auto")
    offered = tuple(_tool(tool) for tool in functions_of(body))
    tools = Tools(offered, mode, named, body.parallel_tool_calls is not False)
    tools.validate()
    return tools if offered else NO_TOOLS


@contextmanager
def naming_fields(body: ResponsesRequest) -> Iterator[None]:
    """Has errors name fields as this body has them: a tool by its place among all tools, and without `function`."""
    places = [i for i, tool in enumerate(body.tools or ()) if tool.type == "function"]

    def named(field: str) -> str:
        if field.startswith(FIELD):
            return "text.format"
        for ours, theirs in _NAMES:
            field = theirs + field.removeprefix(ours) if field.startswith(ours) else field
        if (found := _PLACE.match(field)) and int(found[1]) < len(places):
            field = f"tools[{places[int(found[1])]}]" + field.removeprefix(found[0]).replace(".function", "")
        return field

    try:
        yield
    except RyzansteinError as error:
        raise error.with_fields(named) from None


def functions_of(body: ResponsesRequest) -> list[FunctionTool]:
    """Returns the tools that the model is told of."""
    return [tool for tool in body.tools or () if tool.type == "function"]


def _tool(tool: FunctionTool) -> Tool:
    schema = "" if tool.parameters is None else bytes(tool.parameters).decode()
    return Tool(tool.name or "", tool.description or "", "" if schema == "null" else schema, bool(tool.strict))


def _response_format(text: ResponseText | None) -> Any:
    """Returns the constraint as chats have it. Raises INVALID_ARGUMENT that names the field."""
    if text is None:
        return None
    form = text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Raw(b'{"type":"json_object"}')
    if form.schema is None:
        raise errors.invalid("text.format.schema", "is required")
    strict = b"true" if form.strict else b"false"
    return Raw(b'{"type":"json_schema","json_schema":{"strict":%b,"schema":%b}}' % (strict, bytes(form.schema)))


def _max_tokens(body: ResponsesRequest) -> int | None:
    max_tokens = whole("max_output_tokens", body.max_output_tokens)
    if max_tokens is not None and max_tokens < 1:
        raise errors.invalid("max_output_tokens", "must be at least 1", max_tokens)
    return max_tokens


def _check_metadata(metadata: Mapping[str, str]) -> None:
    for name, value in metadata.items():
        if len(name) > MAX_METADATA_CHARS or len(value) > MAX_METADATA_CHARS:
            raise errors.invalid("metadata", f"keys and values must have at most {MAX_METADATA_CHARS} characters")
