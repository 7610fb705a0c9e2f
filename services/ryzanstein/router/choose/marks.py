"""Digests of a prompt's ever longer beginnings, at lengths that double: a prompt of a million characters has a dozen.

They are counted from where the system prompt ends and cover everything before: what only shares a system prompt shares no
mark, however long that system prompt is.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from itertools import takewhile

from ryzanstein.generation import ChatPrompt, Prompt, Role, TextPrompt, TokenPrompt

# About 64 tokens, four blocks of a usual KV cache: less is not worth a preference.
FIRST_MARK_BYTES = 256


def marks(prompt: Prompt) -> tuple[bytes, ...]:
    """16 bytes each, the shortest beginning first; empty when nothing follows the system prompt for `FIRST_MARK_BYTES`."""
    instructions, rest = _parts(prompt)
    digest = blake2b(instructions, digest_size=16)
    digest.update(len(instructions).to_bytes(8, "big"))
    found, begin = [], 0
    for end in _lengths(len(rest)):
        digest.update(rest[begin:end])
        found.append(digest.digest())
        begin = end
    return tuple(found)


def _lengths(available: int) -> Iterator[int]:
    return takewhile(lambda length: length <= available, (FIRST_MARK_BYTES << doubling for doubling in range(64)))


def _parts(prompt: Prompt) -> tuple[bytes, bytes]:
    """The system prompt, and all that comes after it."""
    match prompt:
        case ChatPrompt(messages):
            system = list(takewhile(lambda message: message.role is Role.SYSTEM, messages))
            # No lengths in front: a document with another question after it must begin alike.
            texts = [f"{message.role.value}\x1f{message.content}\x1e" for message in messages]
            return "".join(texts[: len(system)]).encode(), "".join(texts[len(system) :]).encode()
        case TextPrompt(text):
            return b"", b"text:" + text.encode()
        case TokenPrompt(token_ids):
            return b"", b"tokens:" + b"".join(token.to_bytes(4, "big") for token in token_ids)
