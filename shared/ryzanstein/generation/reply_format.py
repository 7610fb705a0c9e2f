"""How the text of an answer is divided into content, reasoning and calls."""

from __future__ import annotations

from dataclasses import dataclass

from ryzanstein.generation.prompts import MAX_TOOL_CALLS

THINK = "think"
"""The name of the tags `<think>` and `</think>`."""


@dataclass(frozen=True, slots=True)
class ReplyStyle:
    """How a model writes what is not content, as a node reads it from the chat template.

    `calls` is the family in which it calls functions, empty if the request offers none. `thinking`:
    reasoning stands between the `tags` of this name; `opened`: the prompt ends with the first.
    """

    calls: str = ""
    thinking: bool = False
    opened: bool = False
    tags: str = THINK


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How the text of a generation's answers is read, see `ryzanstein.replies`.

    Besides what `ReplyStyle` says: the functions that may be called, and how many calls count as
    such. `named`: the request demanded one function, so that its call is a plain end. For families
    that write arguments without quotation marks: `texts` are those that are texts (`function:argument`),
    and `nullable` those of them that may be null.
    """

    calls: str = ""
    thinking: bool = False
    opened: bool = False
    tools: tuple[str, ...] = ()
    max_calls: int = MAX_TOOL_CALLS
    named: bool = False
    tags: str = THINK
    texts: tuple[str, ...] = ()
    nullable: tuple[str, ...] = ()
