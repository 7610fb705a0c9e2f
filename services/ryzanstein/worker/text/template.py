"""Chat templates: Jinja programs that come with a model and turn a conversation into the text that it was trained on.

They run sandboxed, with the functions that templates in the Hugging Face layout expect. Knows nothing of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ryzanstein import errors
from ryzanstein.generation import Message

MAX_SHOWN_CHARS = 300


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}` marks what an assistant said, for training. Here it is only its contents."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. `variables` are what it sees besides the messages: the names of special tokens.

    Raises jinja2.TemplateSyntaxError when `source` is not a template.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._variables = dict(variables)

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation up to where the assistant speaks next. INVALID_ARGUMENT when the template refuses it: some demand
        that roles alternate, or know no system role."""
        plain = [{"role": message.role.value, "content": message.content} for message in messages]
        try:
            return self._template.render(
                **self._variables, messages=plain, tools=None, documents=None, add_generation_prompt=True
            )
        except Exception as error:  # a template is a program: whatever it stumbles over, it is over these messages
            raise errors.invalid(
                "messages", f"the model's chat template refuses them: {str(error)[:MAX_SHOWN_CHARS]}"
            ) from error


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML; models were trained without."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
