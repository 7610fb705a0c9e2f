"""Compiles and runs a chat template in a sandbox.

A chat template is a Jinja program that comes with a model and turns a conversation into the text
that the model was trained on. It runs with the functions that templates in the Hugging Face layout
expect. The sandbox bounds what it can reach, not what it consumes: the process that it runs in does
that. This module knows nothing of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ryzanstein.worker.text.templates.template_input import TemplateInput, content_text

_END = "\U0010fffe "
"""Stands where a message that is continued ends: a character that Unicode keeps out of texts, and a space."""


class OutputTooLong(Exception):
    """The template wrote more than its bound."""


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}` marks an assistant's text, for training.

    Here it is replaced by its contents. What is set inside is not set outside, as in transformers.
    """

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class ChatTemplate:
    """A compiled template. Compiling already computes its constants, whatever that takes.

    `reads_messages`: it has a use for them. Raises jinja2.TemplateSyntaxError when `source` is not a template.
    """

    def __init__(self, source: str, variables: Mapping[str, str], max_chars: int) -> None:
        environment = _environment()
        environment.globals["strftime_now"] = self._strftime_now
        self._template = environment.from_string(source)
        self.reads_messages = reads(source, "messages")
        self._variables = dict(variables)
        self._max_chars = max_chars
        self._moment = datetime.now()

    def tick(self) -> None:
        """Sets the time that the template sees, which is constant until the next call.

        It stays the same however often the template is run.
        """
        self._moment = datetime.now()

    def text(self, given: TemplateInput) -> str:
        """Returns the conversation up to where the assistant speaks next.

        Raises OutputTooLong, or any exception: a template is a program.
        """
        parts: list[str] = []
        num_chars = 0
        own = {
            "messages": _marked(given.messages) if given.continues else given.messages,
            "tools": given.tools,
            "documents": None,
            "add_generation_prompt": given.add_generation_prompt,
        }
        for part in self._template.generate(**given.variables | self._variables | own):
            num_chars += len(part)
            if num_chars > self._max_chars:
                raise OutputTooLong
            parts.append(part)
        text = "".join(parts)
        return _continued(text) if given.continues else text

    def _strftime_now(self, pattern: str) -> str:
        return self._moment.strftime(pattern)


def _marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with a mark behind the last one's text."""
    last = messages[-1]
    if not content_text(last).strip():
        raise TemplateError("continue_final_message: the last message is empty")
    content = last["content"]
    if isinstance(content, list):
        content = [*content[:-1], content[-1] | {"text": content[-1]["text"] + _END}]
    else:
        content += _END
    return [*messages[:-1], last | {"content": content}]


def _continued(text: str) -> str:
    """Returns the text up to the mark, of which the answer is to be the rest.

    As in transformers, a template that strips messages, and so the mark's space, loses the white space before it too.
    """
    begin = text.rfind(_END[0])
    if begin < 0:
        raise TemplateError("continue_final_message: the template leaves the end of the last message out")
    return text[:begin] if text.startswith(_END, begin) else text[:begin].rstrip()


def parse(source: str) -> None:
    """Checks that `source` is a template, without running any of it.

    Raises jinja2.TemplateSyntaxError or RecursionError.
    """
    _environment().parse(source)


def reads(source: str, name: str) -> bool:
    """Returns whether a template reads the variable with this name, without running any of it; False for no template.

    What it reads of something else (`message.tools`) is not meant.
    """
    try:
        return any(each.name == name and each.ctx == "load" for each in _environment().parse(source).find_all(nodes.Name))
    except (TemplateSyntaxError, RecursionError):
        return False


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON. Jinja's own filter escapes for HTML; models were trained without that."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
