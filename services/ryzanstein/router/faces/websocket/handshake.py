"""The handshake (RFC 6455, 4.2): which requests become sockets."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus

from websockets.datastructures import Headers
from websockets.exceptions import InvalidHandshake, InvalidOrigin
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from ryzanstein.router.faces.http.serving.upgrade import UpgradeRequest
from ryzanstein.router.faces.openai.answers.failures import MALFORMED, ORIGIN, HttpFailure, HttpRefused
from ryzanstein.router.faces.websocket.limits import SocketLimits

SUBPROTOCOL = "ryzanstein.v1"
KEY_PROTOCOL = "openai-insecure-api-key."
"""Before a key that a browser offers as a subprotocol, as to OpenAI, because it cannot set headers. It is never echoed."""
# What the parser would log is written by clients.
_silent = logging.getLogger("ryzanstein.websocket.parser")
_silent.setLevel(logging.CRITICAL + 1)


def accepted(upgrade: UpgradeRequest, limits: SocketLimits) -> ServerProtocol:
    """Returns a parser that has accepted the request; what it is to send is the answer.

    There are no extensions: compression would let a small frame become a large message. Raises
    HttpRefused.
    """
    headers = Headers(upgrade.headers)
    parser = ServerProtocol(
        subprotocols=[Subprotocol(SUBPROTOCOL)],
        extensions=None,
        state=State.OPEN,  # the server has read the request; what follows are frames
        max_size=limits.max_message_bytes,
        logger=_silent,
    )
    _check_origin(headers, limits)
    response = parser.accept(Request(upgrade.target, headers))
    if response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
        raise _refusal(response.status_code, parser.handshake_exc)
    parser.writes.append(response.serialize())
    return parser


def key_of_subprotocols(headers: Mapping[str, str]) -> str:
    """Returns the key that is offered as a subprotocol; empty if there is none."""
    offered = (each.strip() for each in headers.get("sec-websocket-protocol", "").split(","))
    return next((each.removeprefix(KEY_PROTOCOL) for each in offered if each.startswith(KEY_PROTOCOL)), "")


def _check_origin(headers: Headers, limits: SocketLimits) -> None:
    """Refuses a web page of another origin: a browser sends what it knows of its user with it."""
    origin = headers.get("Origin")
    if origin is None or "*" in limits.origins or origin in limits.origins:
        return
    raise HttpRefused(HttpFailure(403, f"Origin: {origin[:128]!r} may not connect", "Origin", "origin_not_allowed"), ORIGIN)


def _refusal(status: int, why: Exception | None) -> HttpRefused:
    field = "Sec-WebSocket-Protocol" if "subprotocol" in str(why) else getattr(why, "name", None)
    if isinstance(why, InvalidHandshake) and not isinstance(why, InvalidOrigin):
        text = str(why)[:256]
    else:
        text = "the request is no WebSocket handshake"
    headers = {"Sec-WebSocket-Version": "13"} if field == "Sec-WebSocket-Version" else {}
    return HttpRefused(HttpFailure(status, text, field, "invalid_handshake", headers), MALFORMED)
