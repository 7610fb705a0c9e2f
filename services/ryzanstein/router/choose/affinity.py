"""What a request stays near: its session, else its user, else its adapter, else requests with the same beginning.

All of it within its cache scope: what another scope has cached is no reason to go anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from ryzanstein.generation.prompts import ChatPrompt, Prompt, Role, TextPrompt, TokenPrompt
from ryzanstein.generation.request import GenerationRequest

# A shorter prefix saves little. A longer one would separate requests that share almost everything.
_PREFIX_CHARS = 1024
_PREFIX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Affinity:
    """What a request stays near.

    `key` orders the nodes. `sticky`: the cached state of a conversation is worth waiting in that
    node's queue; otherwise the key is only a good guess, and balancing the load comes first.
    `marks`: digests of ever longer beginnings, the shortest first; a policy looks up the longest
    one that it knows. `home`: the node that answered the session last, empty if unknown.
    """

    key: bytes
    sticky: bool
    marks: tuple[bytes, ...] = ()
    home: str = ""


def affinity(request: GenerationRequest) -> Affinity:
    """Returns the affinity of a request.

    The key is the same on every router and in every process. Keys of different kinds cannot
    collide.
    """
    if request.session_id:
        return Affinity(_scoped(b"session:" + request.session_id.encode(), request), True, home=request.last_node)
    if request.user:
        return Affinity(_scoped(b"user:" + request.user.encode(), request), True)
    if request.adapter is not None:  # loaded there, and most of its prompts begin alike
        return Affinity(b"adapter:" + scope_key(request), False)
    return Affinity(beginning(request), False)


def beginning(request: GenerationRequest) -> bytes:
    """Returns a key shared by requests of one cache scope and adapter that begin alike, up to the first user message."""
    return b"prefix:" + _prefix(request.prompt, scope_key(request))


def scope_key(request: GenerationRequest) -> bytes:
    """Returns the key of digests of what a request begins with: empty for the empty cache scope without an adapter.

    An adapter changes keys and values: what another one has cached is of no use.
    """
    scope = blake2b(request.cache_scope.encode(), digest_size=16).digest() if request.cache_scope else b""
    return scope if request.adapter is None else blake2b(request.adapter.digest, digest_size=16, key=scope).digest()


def _scoped(key: bytes, request: GenerationRequest) -> bytes:
    return b"scope:" + scope_key(request) + key if request.cache_scope else key


def _prefix(prompt: Prompt, scope: bytes) -> bytes:
    digest = blake2b(digest_size=16, key=scope)
    match prompt:
        case ChatPrompt(messages):
            # Up to the first user message: this is the same in every turn of a conversation whose
            # client sends the whole history, and differs between users who share a system prompt.
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
