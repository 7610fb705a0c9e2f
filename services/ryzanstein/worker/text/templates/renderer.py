"""Runs one template after the other in this process, within whatever bounds the process has."""

from __future__ import annotations

import msgspec
from jinja2 import TemplateSyntaxError

from ryzanstein.generation.prompts import ChatPrompt
from ryzanstein.worker.text.templates.arrangements import marked, written
from ryzanstein.worker.text.templates.forgery import Ambiguous, ControlTexts
from ryzanstein.worker.text.templates.forms import Chosen, Render, Unshown, chosen
from ryzanstein.worker.text.templates.rendering import (
    Limited,
    Outcome,
    Rendered,
    RenderLimit,
    RenderRefused,
    TemplateSource,
    TemplateUnreadable,
    rendered,
)
from ryzanstein.worker.text.templates.sandbox import ChatTemplate, OutputTooLong
from ryzanstein.worker.text.templates.template_input import TemplateInput

AMBIGUOUS = (
    "must not contain the text of control tokens, which the template changes, so their origin in the prompt is ambiguous"
)


class Renderer:
    """A renderer that keeps the last template compiled."""

    def __init__(self) -> None:
        self._source: TemplateSource | None = None
        self._template: ChatTemplate | None = None
        self._control = ControlTexts((), 0)

    def check(self, source: TemplateSource) -> Limited | TemplateUnreadable | None:
        """Compiles a template. Returns None if it can be rendered, else what is wrong."""
        try:
            self._compile(source)
        except TemplateSyntaxError as error:
            return TemplateUnreadable(f"line {error.lineno}: {error}")
        except RecursionError:
            return Limited(RenderLimit.DEPTH)
        except MemoryError:
            return Limited(RenderLimit.MEMORY)
        except Exception as error:  # constants are already computed now
            return TemplateUnreadable(f"{type(error).__name__}: {error}")
        return None

    def render(self, source: TemplateSource, prompt: ChatPrompt) -> Outcome:
        wrong = self.check(source)
        return self._render(prompt) if wrong is None else wrong

    def _compile(self, source: TemplateSource) -> None:
        if self._source is not source:
            self._source = self._template = None
            self._template = ChatTemplate(source.source, source.variables, source.max_chars)
            self._control = ControlTexts(source.control, source.num_special)
            self._source = source

    def _way(self, template: ChatTemplate, prompt: ChatPrompt, calls: str) -> tuple[Render, Chosen]:
        """Returns the conversation as the template reads it: with calls as text where it leaves them out."""
        if not template.reads_messages:
            given = TemplateInput.of(prompt)
            return template.text, Chosen(given, template.text(given))
        try:
            return template.text, chosen(template.text, prompt)
        except (OutputTooLong, RecursionError, MemoryError):
            raise
        except Exception:
            spelled = written(prompt, calls)
            if spelled is None:
                raise
            render = marked(template.text, calls)
            return render, chosen(render, spelled)

    def _render(self, prompt: ChatPrompt) -> Outcome:
        assert self._template is not None
        assert self._source is not None
        self._template.tick()
        try:
            render, way = self._way(self._template, prompt, self._source.calls)
            rendered = self._control.rendered(render, way.given, way.text)
            return msgspec.structs.replace(rendered, shows_tools=way.shows_tools)
        except OutputTooLong:
            return Limited(RenderLimit.OUTPUT)
        except RecursionError:
            return Limited(RenderLimit.DEPTH)
        except MemoryError:
            return Limited(RenderLimit.MEMORY)
        except Exception as error:  # a template is a program: whatever fails in it, fails on these messages
            return _refused(error)


def _refused(error: Exception) -> RenderRefused:
    match error:
        case Unshown():
            return RenderRefused(str(error), error.index)
        case Ambiguous():
            return RenderRefused(AMBIGUOUS)
        case _:
            return RenderRefused(f"the model's chat template refuses them: {error}")


class LocalRenderer:
    """A `ChatRenderer` without its own process, for callers that trust the template."""

    def __init__(self) -> None:
        self._renderer = Renderer()

    async def check(self, template: TemplateSource) -> None:
        wrong = self._renderer.check(template)
        if wrong is not None:
            rendered(wrong)

    async def render(self, template: TemplateSource, prompt: ChatPrompt) -> Rendered:
        return self.render_now(template, prompt)

    def render_now(self, template: TemplateSource, prompt: ChatPrompt) -> Rendered:
        return rendered(self._renderer.render(template, prompt))
