"""What a tab and the console say to each other: JSON, each message of a known type with bounds."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

import msgspec

MOST_BYTES = 64 * 1024
"""Bytes of a message from a tab."""
Id = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Version = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class _FromTab(msgspec.Struct, tag_field="t", forbid_unknown_fields=True):
    """A message of a tab. `call` comes back with the reply, so that the tab knows what it belongs to."""

    call: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of an answer; None: the model's own."""

    model: Annotated[str, msgspec.Meta(max_length=256)] = ""
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**32 - 1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    tools: Annotated[str, msgspec.Meta(max_length=MOST_BYTES)] = ""
    tool_choice: Literal["auto", "none", "required"] = "auto"


class AskedCall(msgspec.Struct, frozen=True):
    """A call of a tool, as the assistant wrote it. `arguments` is JSON, if the model wrote that."""

    id: str
    name: str
    arguments: str


class ToolResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a tool returned."""

    id: Id
    name: Annotated[str, msgspec.Meta(max_length=256)]
    content: Annotated[str, msgspec.Meta(max_length=MOST_BYTES)]


class AskInTab(_FromTab, tag="ask"):
    """Asks in a session; an empty id begins one. Either a text or results of tools."""

    text: Annotated[str, msgspec.Meta(max_length=MOST_BYTES)] = ""
    results: Annotated[list[ToolResult], msgspec.Meta(max_length=64)] = []
    session: Annotated[str, msgspec.Meta(max_length=256)] = ""
    sampling: Sampling = Sampling()


class RetryInTab(_FromTab, tag="retry"):
    """Asks the last question of a session again, in a copy of the conversation."""

    session: Id = ""
    sampling: Sampling = Sampling()


class WatchInTab(_FromTab, tag="watch"):
    """Asks for an answer behind a version of it; 0: all of it."""

    answer: Id = ""
    version: Version = 0


class DetailsInTab(_FromTab, tag="details"):
    """Asks who wrote an answer, and when."""

    answer: Id = ""


class StopInTab(_FromTab, tag="stop"):
    """Ends an answer."""

    answer: Id = ""


class SessionsInTab(_FromTab, tag="sessions"):
    """Asks for the sessions that the cluster keeps."""


class OpenInTab(_FromTab, tag="open"):
    """Shows a session."""

    session: Id = ""


class LeaveInTab(_FromTab, tag="leave"):
    """Shows no session any more."""


class DeleteInTab(_FromTab, tag="delete"):
    """Deletes a session of the cluster."""

    session: Id = ""


class VisibleInTab(_FromTab, tag="visible"):
    """Says whether somebody sees the tab. One that nobody sees gets no frames."""

    visible: bool = True


class ClusterInTab(_FromTab, tag="cluster"):
    """Says whether the tab shows the cluster."""

    watched: bool = True


class ModelsInTab(_FromTab, tag="models"):
    """Asks for the models that the cluster serves."""


class PingInTab(_FromTab, tag="ping"):
    """Asks whether the console is there, where nothing has come for a while."""


FromTab = Union[  # noqa: UP007 (msgspec reads it at run time)
    AskInTab,
    RetryInTab,
    WatchInTab,
    DetailsInTab,
    StopInTab,
    SessionsInTab,
    OpenInTab,
    LeaveInTab,
    DeleteInTab,
    VisibleInTab,
    ClusterInTab,
    ModelsInTab,
    PingInTab,
]

_DECODER: msgspec.json.Decoder[FromTab] = msgspec.json.Decoder(FromTab)
_ENCODER = msgspec.json.Encoder()


class WrongMessage(ValueError):
    """A tab's message that is none, with a sentence that names the field and the bound."""


def read(text: str) -> FromTab:
    """Returns a tab's message. Raises WrongMessage."""
    try:
        return _DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise WrongMessage(str(error)[:300]) from None


def written(message: Any) -> bytes:
    """Returns the bytes of a message to a tab."""
    return _ENCODER.encode(message)


class PartRow(msgspec.Struct):
    """What one node wrote of an answer. `silence_ms` is the pause before it; None: not known, or no move."""

    node: str
    tokens: int = 0
    silence_ms: float | None = None
    cause: str = ""


class _ToTab(msgspec.Struct, tag_field="t", omit_defaults=True):
    """A message to a tab."""


class AnswerFrame(_ToTab, tag="answer"):
    """What of an answer is new behind the version that a tab had.

    `blocks` are appended: each is the part in which it begins, and its tree. `open` replaces the block that still grows, and
    `tail` is appended to it: texts with their parts. `asked` are the calls with which the answer ended. `more`: another frame
    follows at once.
    """

    id: str
    version: int
    status: str
    blocks: list[msgspec.Raw] = []
    open: msgspec.Raw | None = None
    tail: list[tuple[int, str]] = []
    parts: list[PartRow] | None = None
    reasoning: str = ""
    calls: str = ""
    asked: list[AskedCall] | None = None
    tokens: int = 0
    note: str = ""
    figures: str = ""
    model: str = ""
    more: bool = False


class AnswerDetails(_ToTab, tag="details"):
    """Who wrote an answer, and when. `asked_at` is in Unix seconds.

    `timeline` has milliseconds since the question, the number of a part, and tokens that came then. `resumed`: the console was
    restarted meanwhile, and the times are those of reading the answer again.
    """

    id: str
    call: int
    session: str
    question: str
    status: str
    asked_at: float
    generation: str = ""
    model: str = ""
    prompt_tokens: int = 0
    parts: list[PartRow] = []
    timeline: list[tuple[int, int, int]] = []
    note: str = ""
    figures: str = ""
    resumed: bool = False


class ShownTurn(_ToTab, tag="turn"):
    """A question of a session and its answer: one that the console keeps, or what the cluster has of an earlier one."""

    session: str
    question: str = ""
    role: str = "user"
    answer: str = ""
    blocks: list[msgspec.Raw] = []
    asked: list[AskedCall] = []


class SessionRow(msgspec.Struct):
    """A session in the list. `title` is its first question, where the console knows it."""

    session: str
    title: str
    updated: float
    node: str
    running: bool


class SessionList(_ToTab, tag="sessions"):
    sessions: list[SessionRow]
    cut: bool = False


class SessionOpened(_ToTab, tag="opened"):
    """Comes before the turns of a session. `note` says what is missing."""

    session: str
    call: int = 0
    note: str = ""


class Pong(_ToTab, tag="pong"):
    """The console is there."""


class SessionStale(_ToTab, tag="stale"):
    """The cluster knows more of a session than the console: it is to be opened again."""

    session: str


class Reply(_ToTab, tag="reply"):
    """Ends a call. `error` is a sentence; empty: it was done."""

    call: int
    error: str = ""
    session: str = ""
    answer: str = ""


class ModelRow(msgspec.Struct):
    name: str
    context: int
    nodes: int


class ModelRows(_ToTab, tag="models"):
    models: list[ModelRow]


class Welcome(_ToTab, tag="welcome"):
    """The first message. `process` is another one after the console was restarted."""

    process: str
    routers: str
