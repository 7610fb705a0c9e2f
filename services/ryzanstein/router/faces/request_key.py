"""What tells a request that is sent again from a new one: the client's key, within its tenant, and a digest of the body.

The key is what a client chose, `request_id` over gRPC (as in AIP-155) or `Idempotency-Key` over HTTP. It is not the id in
`x-request-id`, which proxies make and change. Neither key nor body leaves the router: what is stored and compared are digests.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import fields, replace
from hashlib import blake2b

from ryzanstein import errors
from ryzanstein.generation import ChatPrompt, GenerationRequest, Prompt, RequestKey, SamplingParams, TextPrompt, TokenPrompt

MAX_KEY_CHARS = 255
HEADER = "Idempotency-Key"
_VISIBLE = re.compile(r"[\x20-\x7e]+")
# A string of RFC 8941 (3.3.3), as draft-ietf-httpapi-idempotency-key-header asks for.
_QUOTED = re.compile(r'"((?:[\x20-\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')
_DEFAULTS = SamplingParams()


def keyed(request: GenerationRequest, key: str, field: str) -> GenerationRequest:
    """The request under this key, none if it is empty. INVALID_ARGUMENT naming `field` for one that is no key. The request is
    as the client sent it, its tenant known."""
    if not key:
        return request
    if len(key) > MAX_KEY_CHARS or not _VISIBLE.fullmatch(key):
        raise errors.invalid(field, f"has 1 to {MAX_KEY_CHARS} visible ASCII characters", key[:64])
    return replace(request, key=RequestKey(_digest(_framed(request.tenant, key)).hex(), _digest(_parts(request))))


def key_of_header(value: str | None) -> str:
    """Quoted, as the draft has it, or bare, as most clients send it. INVALID_ARGUMENT for an empty or a torn one."""
    if value is None:
        return ""
    quoted = _QUOTED.fullmatch(value.strip())
    key = re.sub(r"\\(.)", r"\1", quoted[1]) if quoted else value.strip()
    if not key or (quoted is None and '"' in key):
        raise errors.invalid(
            HEADER, f"has 1 to {MAX_KEY_CHARS} visible ASCII characters, in quotation marks or without", value[:64]
        )
    return key


def _digest(parts: Iterator[bytes]) -> bytes:
    digest = blake2b(digest_size=16)
    for part in parts:
        # Its length in front, so that no two lists of parts are read as one.
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


def _framed(*texts: str) -> Iterator[bytes]:
    return (text.encode() for text in texts)


def _parts(request: GenerationRequest) -> Iterator[bytes]:
    """All of the body that a client repeats when it repeats itself: not the deadline, the trace, or what routers add."""
    yield from _framed(request.model, request.session_id, request.user, str(request.priority), _sampling(request.sampling))
    yield from _prompt(request.prompt)


def _sampling(sampling: SamplingParams) -> str:
    """What differs from the defaults, so that a field that a later version has changes no digest."""
    given = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
    return json.dumps({name: value for name, value in given.items() if value != getattr(_DEFAULTS, name)}, sort_keys=True)


def _prompt(prompt: Prompt) -> Iterator[bytes]:
    match prompt:
        case ChatPrompt(messages):
            yield b"chat"
            for message in messages:
                yield from _framed(message.role.value, message.content)
        case TextPrompt(text):
            yield from _framed("text", text)
        case TokenPrompt(token_ids):
            yield b"tokens"
            yield array("Q", token_ids).tobytes()
