"""What is answered: a conversation, a text or tokens."""

from __future__ import annotations

from dataclasses import dataclass

from ryzanstein.generation.messages import Message
from ryzanstein.generation.template_options import PLAIN_TEMPLATE, TemplateOptions
from ryzanstein.generation.tools import NO_TOOLS, Tools


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
