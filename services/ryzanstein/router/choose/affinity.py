"""What a request wants to stay near: its session, else its user, else other requests that begin like it."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from ryzanstein.generation import ChatPrompt, GenerationRequest, Prompt, Role, TextPrompt, TokenPrompt

# A prefix shorter than this is little to reuse; one longer would tell apart requests that share almost everything.
_PREFIX_CHARS = 1024
_PREFIX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Affinity:
    """`key` orders the nodes. `sticky`: a conversation's state is worth waiting in that node's queue for; otherwise the key
    is only a good guess, and load is shared among nodes first. `marks`: digests of ever longer beginnings, the shortest
    first, where a policy looks for the longest one that it knows. `home`: the node that answered the session last, empty
    when that is not known."""

    key: bytes
    sticky: bool
    marks: tuple[bytes, ...] = ()
    home: str = ""


def affinity(request: GenerationRequest) -> Affinity:
    """The key is the same on every router and in every process; the kinds of keys cannot collide."""
    if request.session_id:
        return Affinity(b"session:" + request.session_id.encode(), True, home=request.last_node)
    if request.user:
        return Affinity(b"user:" + request.user.encode(), True)
    return Affinity(beginning(request.prompt), False)


def beginning(prompt: Prompt) -> bytes:
    """A key that requests share which begin alike, up to the first user message."""
    return b"prefix:" + _prefix(prompt)


def _prefix(prompt: Prompt) -> bytes:
    digest = blake2b(digest_size=16)
    match prompt:
        case ChatPrompt(messages):
            # Up to the first user message: the same in every turn of a conversation whose client sends the whole history,
            # and not the same for all who share a system prompt.
            for message in messages:
                begin = message.content[:_PREFIX_CHARS]
                digest.update(f"{message.role.value}:{len(begin)}:{begin}".encode())
                if message.role is Role.USER:
                    break
        case TextPrompt(text):
            digest.update(text[:_PREFIX_CHARS].encode())
        case TokenPrompt(token_ids):
            digest.update(repr(token_ids[:_PREFIX_TOKENS]).encode())
    return digest.digest()
