"""Digests of a prompt's ever longer beginnings, at lengths that double.

A prompt of a million characters has a dozen. Lengths count from the end of the system prompt, but
the digests cover it too: prompts that share only a system prompt share no mark, however long it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from itertools import takewhile

from ryzanstein.generation.messages import Message, Role
from ryzanstein.generation.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt

# About 64 tokens, four blocks of a typical KV cache. A shorter match is not worth a preference.
FIRST_MARK_BYTES = 256


def marks(prompt: Prompt) -> tuple[bytes, ...]:
    """Returns digests of 16 bytes, the shortest beginning first.

    Empty when fewer than `FIRST_MARK_BYTES` follow the system prompt.
    """
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
    """Returns the system prompt, and everything after it."""
    match prompt:
        case ChatPrompt(messages):
            system = list(takewhile(lambda message: message.role is Role.SYSTEM, messages))
            # No length prefixes: a document followed by a different question must begin alike.
            texts = [f"{message.role.value}\x1f{message.content}{_parts_of(message)}\x1e" for message in messages]
            offered = "".join(f"{tool.name}\x1f{tool.description}\x1f{tool.parameters}\x1e" for tool in prompt.tools.offered)
            return (offered + "".join(texts[: len(system)])).encode(), "".join(texts[len(system) :]).encode()
        case TextPrompt(text):
            return b"", b"text:" + text.encode()
        case TokenPrompt(token_ids):
            return b"", b"tokens:" + b"".join(token.to_bytes(4, "big") for token in token_ids)


def _parts_of(message: Message) -> str:
    return "".join(f"\x1f{call.name}\x1f{call.arguments}" for call in message.tool_calls)
