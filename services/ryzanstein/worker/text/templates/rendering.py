"""The interface between an agent and its template process: what is rendered, what is returned."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import msgspec

from ryzanstein import errors
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import ChatPrompt

TEMPLATE_LIMIT = "TEMPLATE_LIMIT"
MAX_VISIBLE_CHARS = 300


class TemplateSource(msgspec.Struct, frozen=True):
    """A model's template.

    `variables` are what it sees besides the messages: the names of special tokens. `control` are
    the texts of the tokens that only the template may write; the first `num_special` of them are
    those that the tokenizer calls special, which templates do not look for. `max_chars` bounds its
    output. `calls` is the family in which the model calls functions.
    """

    source: str
    variables: dict[str, str]
    control: tuple[str, ...]
    num_special: int
    max_chars: int
    calls: str = ""


class Rendered(msgspec.Struct, frozen=True, tag=True):
    """A conversation's text.

    `control` has the template's own control tokens in order: offset in `text`, index in
    `TemplateSource.control`. `forged`: the text has more of them, which come from the messages.
    `shows_tools`: the tools, if there are any, are in the text.
    """

    text: str
    control: list[tuple[int, int]]
    forged: bool
    shows_tools: bool = True


class RenderLimit(StrEnum):
    """The bound that a template broke."""

    TIME = "time"
    MEMORY = "memory"
    OUTPUT = "output"
    DEPTH = "depth"
    PROCESS = "process"


class Limited(msgspec.Struct, frozen=True, tag=True):
    """A template that did not end within its bounds."""

    limit: RenderLimit


class RenderRefused(msgspec.Struct, frozen=True, tag=True):
    """A template that does not accept these messages, or fails on them; `index`: on this one."""

    message: str
    index: int | None = None


class TemplateUnreadable(msgspec.Struct, frozen=True, tag=True):
    """A source that is not a template."""

    message: str


Outcome = Rendered | Limited | RenderRefused | TemplateUnreadable


class ChatRenderer(Protocol):
    """A renderer of templates for an agent."""

    async def check(self, template: TemplateSource) -> None:
        """Prepares a template.

        FAILED_PRECONDITION with reason MODEL_INVALID: it is not a template.
        """
        ...

    async def render(self, template: TemplateSource, prompt: ChatPrompt) -> Rendered:
        """Returns the conversation up to where the assistant speaks next.

        Raises the errors of `rendered`, and RESOURCE_EXHAUSTED when too many wait.
        """
        ...


def rendered(outcome: Outcome) -> Rendered:
    """Returns the rendered conversation, or raises the error of another outcome.

    INVALID_ARGUMENT: the template refuses the messages: some demand that roles alternate, or know
    no system role. FAILED_PRECONDITION: it breaks a bound, or is not a template.
    """
    match outcome:
        case Rendered():
            return outcome
        case Limited(limit):
            raise limited(limit)
        case RenderRefused(message, index):
            raise errors.invalid("messages" if index is None else f"messages[{index}]", message[:MAX_VISIBLE_CHARS])
        case TemplateUnreadable(message):
            raise errors.failed_precondition("MODEL_INVALID", f"chat template: {message[:MAX_VISIBLE_CHARS]}")


def limited(limit: RenderLimit) -> RyzansteinError:
    """Returns the error for a broken bound.

    Other nodes have the same template, so no other node is tried.
    """
    return RyzansteinError(_MEANING[limit], Code.FAILED_PRECONDITION, TEMPLATE_LIMIT, {"limit": limit.value})


_MEANING = {
    RenderLimit.TIME: "the model's chat template takes too long",
    RenderLimit.MEMORY: "the model's chat template takes too much memory",
    RenderLimit.OUTPUT: "the model's chat template produces too much text",
    RenderLimit.DEPTH: "the model's chat template is nested too deeply",
    RenderLimit.PROCESS: "the process that renders the model's chat template ended twice",
}
