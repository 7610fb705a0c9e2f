"""The tokens of a conversation, and which of them are learned: what the assistant says, with the end of its turn.

The model's chat template is rendered as for an answer, up to where the assistant speaks, and again with what
it said. If the first is the beginning of the second, the rest is learned. A whole conversation is one
example if that holds of all its turns at once. Some templates leave earlier reasoning out: then each turn is an
example of its own, as it is served.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import ChatPrompt, Message, Role, TemplateOptions
from ryzanstein.replies.tags import TAGS
from ryzanstein.tools.finetune.data.records import Chat, Continuation, Item, Unfit
from ryzanstein.worker.text.calling import Calling
from ryzanstein.worker.text.templates.renderer import LocalRenderer
from ryzanstein.worker.text.templates.rendering import Rendered
from ryzanstein.worker.text.tokenizer import TextModel

_MARK = "☺"
"""A character that no token joins with others: what is encoded behind it has no space put before it."""
_PROBE = "\uf8f0"
"""An answer that begins as nothing that a template writes."""
_NEXT = Message(Role.USER, "?")

LearnedSpan = tuple[int, int]
"""The index of the first token, and that behind the last one."""


@dataclass(frozen=True, slots=True)
class TokenizedExample:
    """An example: its tokens, and which of them are learned."""

    ids: Sequence[int]
    learned: tuple[LearnedSpan, ...]


@dataclass(frozen=True, slots=True)
class _Turn:
    """A prompt as it is served, and the answer up to the end of the turn. `joined`: the template's tokens are these."""

    prompt: list[int]
    answer: list[int]
    joined: bool

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.answer

    @property
    def span(self) -> LearnedSpan:
        return len(self.prompt), len(self.prompt) + len(self.answer)


class Encoder:
    """Makes examples with the text side of a model. `notes` are remarks on the template, each once.

    `variables` is a JSON object of what the template is given besides the messages, or empty.
    """

    def __init__(self, text: TextModel, variables: str = "") -> None:
        self._text, self._renderer, self._variables = text, LocalRenderer(), variables
        self.notes: dict[str, None] = {}

    def examples(self, item: Item) -> list[TokenizedExample]:
        """Returns the examples that an item of a file makes. Raises Unfit."""
        try:
            return [self._continuation(item)] if isinstance(item, Continuation) else self._chat(item)
        except RyzansteinError as error:
            if error.code is Code.FAILED_PRECONDITION:  # of the model, not of this example
                raise
            raise Unfit(str(error)) from error

    def _continuation(self, item: Continuation) -> TokenizedExample:
        prompt = self._text.encode(item.prompt)
        answer = self._behind_mark(Rendered(item.completion, [], forged=True)) if item.prompt else []
        if not item.prompt:
            start = len(prompt)
            answer = self._text.encode(item.completion)[start:]
        return TokenizedExample([*prompt, *answer, self._end_id], ((len(prompt), len(prompt) + len(answer) + 1),))

    def _chat(self, chat: Chat) -> list[TokenizedExample]:
        turns = [self._turn(chat, index) for index in chat.learned]
        whole = self._encode(chat, chat.messages[: chat.learned[-1] + 1], speaks=False)
        if all(turn.joined and whole[: len(turn.ids)] == turn.ids for turn in turns[:-1]) and self._is_last(whole, turns[-1]):
            return [TokenizedExample(turns[-1].ids, tuple(turn.span for turn in turns))]
        return [TokenizedExample(turn.ids, (turn.span,)) for turn in turns]

    def _is_last(self, whole: list[int], last: _Turn) -> bool:
        """Returns whether the last turn is that of the whole conversation, but for an end that its template lacks."""
        known = min(len(whole), len(last.ids))
        return last.joined and whole[:known] == last.ids[:known]

    def _turn(self, chat: Chat, index: int) -> _Turn:
        before, spoken = chat.messages[:index], chat.messages[: index + 1]
        asked, said = self._render(chat, before, speaks=True), self._render(chat, spoken, speaks=False)
        start = len(asked.text) if said.text.startswith(asked.text) else self._start(chat, index, asked.text)
        prompt, full = self._text.encode_rendered(asked), self._text.encode_rendered(said)
        joined = full[: len(prompt)] == prompt
        answer = full[len(prompt) :] if joined else self._behind_mark(_rest(said, start))
        if not answer:
            raise Unfit(f"messages[{index}]: the model's chat template leaves it out: there is nothing to learn from")
        return _Turn(prompt, self._ended(chat, index, answer), joined)

    def _start(self, chat: Chat, index: int, asked: str) -> int:
        """Returns where an answer begins in a template that writes an empty thought before it, which it leaves out later."""
        probe = replace(chat.messages[index], content=_PROBE, tool_calls=(), reasoning="")
        said = self._render(chat, (*chat.messages[:index], probe), speaks=False).text
        both = zip(asked, said, strict=False)
        common = next((place for place, (one, other) in enumerate(both) if one != other), len(asked))
        thought = asked[common:].strip()
        if not any(thought.startswith(tags.begin) and thought.endswith(tags.end) for tags in TAGS.values()):
            raise Unfit(
                f"messages[{index}]: the model's chat template does not write this after its prompt for an answer, which may "
                "begin to reason: give it reasoning_content, or the template a variable (--chat-template-kwargs)"
            )
        return common

    def _ended(self, chat: Chat, index: int, answer: list[int]) -> list[int]:
        """Returns an answer up to the token that ends it when it is served.

        Some templates write that token only before the next message, some never.
        """
        text = self._text
        end = next((place for place, each in enumerate(answer) if each in text.eos_token_ids), None)
        if end is not None:
            return answer[: end + 1]
        control = [place for place, each in enumerate(answer) if text.is_control(each)]
        if control and not text.decode(answer[control[-1] + 1 :]).strip():
            ending = text.token_text(answer[control[-1]])
            self.notes[f"the chat template ends a turn with {ending}, which ends no answer: see eos_token_id"] = None
            return answer[: control[-1] + 1]
        following = self._following(chat, index)
        if following in text.eos_token_ids:
            return [*answer, following]
        self.notes["the chat template ends no turn of the assistant: the token that ends a text is learned there"] = None
        return [*answer, self._end_id]

    def _following(self, chat: Chat, index: int) -> int:
        """Returns the token that the template writes between a message and a user's next one, -1 if it is none."""
        spoken = chat.messages[: index + 1]
        try:
            known, longer = (self._encode(chat, messages, speaks=False) for messages in (spoken, (*spoken, _NEXT)))
        except RyzansteinError:
            return -1
        return longer[len(known)] if longer[: len(known)] == known and len(longer) > len(known) else -1

    def _encode(self, chat: Chat, messages: Sequence[Message], *, speaks: bool) -> list[int]:
        return self._text.encode_rendered(self._render(chat, messages, speaks=speaks))

    def _render(self, chat: Chat, messages: Sequence[Message], *, speaks: bool) -> Rendered:
        """Returns the conversation as it is served: functions in a generic form where the template knows none."""
        prompt = ChatPrompt(tuple(messages), TemplateOptions(self._variables, speaks), chat.tools)
        calling = self._text.calling_of(prompt)
        try:
            rendered = self._rendered(prompt, calling)
        except RyzansteinError:
            if not calling.native:
                raise
            return self._rendered(prompt, calling.generic())
        return rendered if rendered.shows_tools else self._rendered(prompt, calling.generic())

    def _rendered(self, prompt: ChatPrompt, calling: Calling) -> Rendered:
        given = calling.described(prompt)
        return self._renderer.render_now(self._text.checked_chat(given), given)

    def _behind_mark(self, rendered: Rendered) -> list[int]:
        """Returns the tokens of the rest of a text, without a space that a tokenizer puts before a whole one."""
        control = [(offset + len(_MARK), index) for offset, index in rendered.control]
        mark = self._text.encode_rendered(Rendered(_MARK, [], forged=False))
        marked = self._text.encode_rendered(Rendered(_MARK + rendered.text, control, rendered.forged))
        return marked[len(mark) :] if marked[: len(mark)] == mark else self._text.encode_rendered(rendered)

    @cached_property
    def _end_id(self) -> int:
        """The token that ends a text."""
        if not self._text.eos_token_ids:
            raise Unfit("the model has no token that ends an answer: set eos_token_id in generation_config.json")
        return min(self._text.eos_token_ids)


def _rest(rendered: Rendered, start: int) -> Rendered:
    control = [(offset - start, index) for offset, index in rendered.control if offset >= start]
    return Rendered(rendered.text[start:], control, rendered.forged)


def spans_of(learned: Sequence[LearnedSpan]) -> Iterator[int]:
    """Yields the index of each token that is learned."""
    for start, end in learned:
        yield from range(start, end)
