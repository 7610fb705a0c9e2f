"""An answer, as far as it has arrived: what each node wrote of it, and where it moved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ryzanstein.v1 import inference_pb2 as pb


@dataclass(slots=True)
class Part:
    """What one node wrote: `tokens` of them from `first_index`, and the characters `start` to `end` of the text.

    Text that was held back at a seam, an unfinished character for example, counts to the part that made it certain.
    """

    node: str
    choice: int
    first_index: int
    tokens: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Move:
    """An answer went on at another node. `silence_s` is the time between two tokens at the router, or here where that does not
    say it.

    `cause` is what the router knows, such as link_lost; empty: it does not say.
    """

    choice: int
    from_node: str
    to_node: str
    at_index: int
    silence_s: float
    cause: str = ""


@dataclass(slots=True)
class AnswerChoice:
    """One of the answers to a prompt. `finish_reason` is empty until it has ended."""

    choice: int = 0
    reasoning: str = ""
    tool_calls: list[pb.ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    parts: list[Part] = field(default_factory=list)
    num_chars: int = 0
    _pieces: list[str] = field(default_factory=list, repr=False)

    @property
    def text(self) -> str:
        """Returns the text. Pieces are joined here: appending each to a long text would copy it each time."""
        return "".join(self._pieces)

    def add(self, text: str) -> None:
        """Appends a piece of text."""
        if text:
            self._pieces.append(text)
            self.num_chars += len(text)

    def call(self, pieces: Iterable[pb.ToolCallDelta]) -> None:
        """Appends pieces of calls. Raises IndexError for a piece of a call that has not begun."""
        for piece in pieces:
            if piece.index == len(self.tool_calls):
                self.tool_calls.append(pb.ToolCall(id=piece.id, name=piece.name))
            self.tool_calls[piece.index].arguments += piece.arguments


@dataclass(slots=True)
class Answer:
    """An answer with its choices. Times are of one monotonic clock, in seconds; 0: not yet."""

    asked_at: float
    generation_id: str = ""
    model: str = ""
    choices: list[AnswerChoice] = field(default_factory=lambda: [AnswerChoice()])
    usage: pb.Usage = field(default_factory=pb.Usage)
    prompt: list[pb.PromptToken] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    reattaches: int = 0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    longest_pause_s: float = 0.0
    accepted_by: str = ""

    @property
    def text(self) -> str:
        """Returns the text of the first choice."""
        return self.choices[0].text

    @property
    def reasoning(self) -> str:
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> list[pb.ToolCall]:
        return self.choices[0].tool_calls

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    @property
    def parts(self) -> list[Part]:
        return self.choices[0].parts

    @property
    def complete(self) -> bool:
        return all(choice.finish_reason for choice in self.choices)

    @property
    def nodes(self) -> list[str]:
        """Returns the node that accepted the request, then each that wrote a part."""
        found = [self.accepted_by] if self.accepted_by else []
        for part in self.parts:
            if part.node not in found[-1:]:
                found.append(part.node)
        return found

    @property
    def time_to_first_token_s(self) -> float | None:
        return self.first_token_at - self.asked_at if self.first_token_at else None

    @property
    def tokens_per_s(self) -> float | None:
        """Returns the rate from the request to the last token: tokens that arrive in a burst do not make it look faster."""
        num_tokens = sum(len(choice.token_ids) for choice in self.choices)
        return num_tokens / (self.last_token_at - self.asked_at) if self.first_token_at else None


@dataclass(frozen=True, slots=True)
class Position:
    """Where a reader of a generation is: the next index of each choice. Another client goes on from there."""

    generation_id: str
    next_index: tuple[int, ...]
