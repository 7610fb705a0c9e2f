"""What an agent and its template process say to each other, and how it is framed: four bytes of length, then MessagePack."""

from __future__ import annotations

import struct

import msgspec

from ryzanstein.worker.text.templates.rendering import Outcome, Said, TemplateSource

LENGTH = struct.Struct("!I")
MAX_FRAME_BYTES = 256 * 2**20
"""More is nothing that either of them says."""


class Job(msgspec.Struct, frozen=True):
    """`template` is there when it is another one than before. Without messages it is only compiled."""

    template: TemplateSource | None
    messages: list[Said] | None


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The process takes jobs; or it has compiled a template."""


Answer = Ready | Outcome


def framed(message: Job | Answer) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(payload)) + payload
