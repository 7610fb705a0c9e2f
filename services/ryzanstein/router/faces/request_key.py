"""Distinguishes a repeated request from a new one: the client's key and a digest of the body.

The key is valid within its tenant. The client chooses it: `request_id` over gRPC (as in AIP-155) or
`Idempotency-Key` over HTTP. It is not the id in `x-request-id`, which proxies create and change.
Neither key nor body leaves the router: only digests are stored and compared.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import fields, replace
from hashlib import blake2b
from struct import Struct
from typing import Any

from ryzanstein import errors
from ryzanstein.constraints import Constraint
from ryzanstein.generation.prompts import PLAIN_TEMPLATE, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from ryzanstein.generation.request import GenerationRequest, RequestKey, SamplingParams
from ryzanstein.generation.tools import NO_TOOLS

MAX_KEY_CHARS = 255
HEADER = "Idempotency-Key"
_VISIBLE = re.compile(r"[\x20-\x7e]+")
# A string of RFC 8941 (3.3.3), as draft-ietf-httpapi-idempotency-key-header requires.
_QUOTED = re.compile(r'"((?:[\x20-\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')
_DEFAULTS = SamplingParams()
_FLOAT = Struct("f")


def keyed(request: GenerationRequest, key: str, field: str) -> GenerationRequest:
    """Returns the request with this key, or without one when the key is empty.

    The request must be as the client sent it, with its tenant set. Raises INVALID_ARGUMENT naming
    `field` for an invalid key.
    """
    if not key:
        return request
    if len(key) > MAX_KEY_CHARS or not _VISIBLE.fullmatch(key):
        raise errors.invalid(field, f"must have 1 to {MAX_KEY_CHARS} visible ASCII characters", key[:64])
    return replace(request, key=RequestKey(_digest(_framed(request.tenant, key)).hex(), _digest(_parts(request))))


def key_of_header(value: str | None) -> str:
    """Returns the key of a header: quoted, as in the draft, or bare, as most clients send it.

    Raises INVALID_ARGUMENT for an empty key, or one with broken quotation marks.
    """
    if value is None:
        return ""
    quoted = _QUOTED.fullmatch(value.strip())
    key = re.sub(r"\\(.)", r"\1", quoted[1]) if quoted else value.strip()
    if not key or (quoted is None and '"' in key):
        raise errors.invalid(HEADER, f"must have 1 to {MAX_KEY_CHARS} visible ASCII characters, quoted or unquoted", value[:64])
    return key


def _digest(parts: Iterator[bytes]) -> bytes:
    digest = blake2b(digest_size=16)
    for part in parts:
        # The length comes first, so that two different lists of parts never read the same.
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


def _framed(*texts: str) -> Iterator[bytes]:
    return (text.encode() for text in texts)


def _parts(request: GenerationRequest) -> Iterator[bytes]:
    """Yields the parts of the request that a client repeats when it sends the request again.

    The deadline, the trace and what routers add are not among them.
    """
    yield from _framed(request.model, request.session_id, request.user, str(request.priority), _sampling(request.sampling))
    yield from _prompt(request.prompt)


def _sampling(sampling: SamplingParams) -> str:
    """Returns the parameters that differ from the defaults.

    A field that a later version adds thus changes no digest.
    """
    given = {field.name: _as_sent(getattr(sampling, field.name)) for field in fields(sampling) if field.compare}
    return json.dumps({name: value for name, value in given.items() if value != getattr(_DEFAULTS, name)}, sort_keys=True)


def _as_sent(value: Any) -> Any:
    """Returns the value with its numbers in the 32 bits that they have over gRPC.

    A request is thus the same over all faces.
    """
    match value:
        case float():
            return _FLOAT.unpack(_FLOAT.pack(value))[0]
        case tuple():
            return tuple(map(_as_sent, value))
        case Constraint(kind, text, after, lenient):
            return (kind.value, text, after, "lenient") if lenient else (kind.value, text, after)
    return value


def _prompt(prompt: Prompt) -> Iterator[bytes]:
    match prompt:
        case ChatPrompt(messages, template, tools):
            yield b"chat"
            for message in messages:
                yield from _framed(message.role.value, message.content)
                if not message.is_plain:
                    calls = [part for call in message.tool_calls for part in (call.id, call.name, call.arguments)]
                    yield from _framed("parts", message.tool_call_id, message.name, message.reasoning, str(len(calls)), *calls)
            if template != PLAIN_TEMPLATE:
                yield from _framed(template.variables, str(template.add_generation_prompt), str(template.continues))
            if tools != NO_TOOLS:
                parts = [part for t in tools.offered for part in (t.name, t.description, t.parameters, str(t.strict))]
                yield from _framed("tools", tools.mode.value, tools.named, str(tools.parallel), *parts)
        case TextPrompt(text, suffix):
            yield from _framed("text", text, *(() if suffix is None else ("suffix", suffix)))
        case TokenPrompt(token_ids):
            yield b"tokens"
            yield array("Q", token_ids).tobytes()
