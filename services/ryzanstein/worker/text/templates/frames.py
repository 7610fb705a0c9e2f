"""The messages between an agent and its template process, and their framing.

A frame is four bytes of length, then MessagePack.
"""

from __future__ import annotations

import struct

import msgspec

from ryzanstein.generation.prompts import ChatPrompt
from ryzanstein.worker.text.templates.rendering import Outcome, TemplateSource

LENGTH = struct.Struct("!I")
MAX_FRAME_BYTES = 256 * 2**20
"""Neither side sends more."""


class TemplateJob(msgspec.Struct, frozen=True):
    """A job: a conversation to render.

    `template` is present when it differs from the one before. Without a conversation it is only
    compiled.
    """

    template: TemplateSource | None
    prompt: ChatPrompt | None


class TemplateReady(msgspec.Struct, frozen=True, tag=True):
    """The process is ready for jobs, or has compiled a template."""


Answer = TemplateReady | Outcome


def framed(message: TemplateJob | Answer) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(payload)) + payload
