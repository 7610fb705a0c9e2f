"""The messages between an agent and its grammar process.

One datagram each, MessagePack, over a socket of sequenced packets: several processes may answer on
it. With `Opened` comes a descriptor of a file with the packed table of tokens.
"""

from __future__ import annotations

import msgspec

from ryzanstein.constraints import Constraint

MAX_PACKET_BYTES = 192 * 2**10
"""More than a constraint's text takes, and less than a socket's buffer."""


class Open(msgspec.Struct, frozen=True, tag=True):
    """A request to read a model's tokens. Answered with Opened or Unreadable.

    `template_file` decides which tokens only templates may write; empty: the model's own template.
    """

    job: int
    key: str
    path: str
    name: str
    template_file: str


class Judge(msgspec.Struct, frozen=True, tag=True):
    """A request to compile a constraint for a model that is open. Answered with Sound, Refused or Ended."""

    job: int
    key: str
    constraint: Constraint


class Close(msgspec.Struct, frozen=True, tag=True):
    """The model is no longer needed. Not answered."""

    key: str


class JudgeReady(msgspec.Struct, frozen=True, tag=True):
    """The process has started."""


class Opened(msgspec.Struct, frozen=True, tag=True):
    """A model's tokens are known. A file descriptor is attached."""

    job: int


class Unreadable(msgspec.Struct, frozen=True, tag=True):
    """A model's tokens cannot be read."""

    job: int
    message: str


class Sound(msgspec.Struct, frozen=True, tag=True):
    """A constraint can be enforced. `grammar_bytes`: the memory that its grammar took, about."""

    job: int
    compile_s: float
    grammar_bytes: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A constraint cannot be enforced; `cause` as in `constraints.refusal.Cause`."""

    job: int
    cause: str
    message: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The process that compiled a constraint ended without an answer, with this exit code."""

    job: int
    code: int


Request = Open | Judge | Close
Answer = JudgeReady | Opened | Unreadable | Sound | Refused | Ended


def packed(message: Request | Answer) -> bytes:
    return msgspec.msgpack.encode(message)
