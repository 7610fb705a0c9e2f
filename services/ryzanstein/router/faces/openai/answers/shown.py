"""How an answer is shown: what a reader that comes back need not say again.

It travels with the request as an opaque text, also to other routers.
"""

from __future__ import annotations

from dataclasses import dataclass

from ryzanstein.router.faces.openai.answers.dialect import ChatDialect, CompletionDialect, Dialect
from ryzanstein.router.faces.openai.requests.schemas import GenerationOptions

_USAGE, _CONTINUOUS = "usage", "continuous"


@dataclass(frozen=True, slots=True)
class Shown:
    """The form of an answer. `usage`: a stream ends with it; `continuous`: each chunk has it."""

    dialect: Dialect
    usage: bool = False
    continuous: bool = False

    @classmethod
    def read(cls, text: str, response_id: str) -> Shown:
        """Returns what `written` wrote. What is unknown, and of another version, is left out.

        `response_id` tells the form of a generation whose text says nothing.
        """
        kind, *flags = text.split(",")
        if not kind:
            kind = CompletionDialect.kind if response_id.startswith(CompletionDialect.id_prefix) else ""
        dialect: Dialect = CompletionDialect() if kind == CompletionDialect.kind else ChatDialect()
        return cls(dialect, _USAGE in flags, _CONTINUOUS in flags)

    @property
    def written(self) -> str:
        flags = [name for name, is_set in ((_USAGE, self.usage), (_CONTINUOUS, self.continuous)) if is_set]
        return ",".join((self.dialect.kind, *flags))


def shown_by(body: GenerationOptions, dialect: Dialect) -> Shown:
    """Returns the form that a request asks for."""
    options = body.stream_options
    if options is None:
        return Shown(dialect)
    return Shown(dialect, bool(options.include_usage), bool(options.continuous_usage_stats))
