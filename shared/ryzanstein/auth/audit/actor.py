"""Who calls, for a record. This is the one place that says so."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from ryzanstein.auth.audit.audit_record import clipped

_SCHEME = "spiffe://"


def actor_of(context: Any) -> str:
    """Returns who makes a call: role and name of its client certificate, such as `operator/ada`.

    They are the path of the certificate's URI, `spiffe://TRUST/ROLE/NAME`. The handshake has verified
    the certificate, and who may call is not judged here. Empty: the connection has none, and nobody
    knows who calls.
    """
    uris = context.auth_context().get("peer_uri", ())
    if len(uris) != 1:
        return ""
    _, _, path = bytes(uris[0]).decode("latin-1").removeprefix(_SCHEME).partition("/")
    return clipped(unquote(path))


def address_of(context: Any) -> str:
    """Returns the address that a call comes from, such as `ipv4:10.0.0.7:41234`."""
    return clipped(unquote(context.peer() or ""))
