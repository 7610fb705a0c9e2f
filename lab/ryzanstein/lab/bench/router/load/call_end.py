"""How a call ended, as its last header block says it: gRPC's status, or what a proxy answered in its place."""

from __future__ import annotations

import base64
import binascii
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import unquote

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from ryzanstein.errors import Code
from ryzanstein.lab.bench.router.load.header_block import header_fields
from ryzanstein.rpc.status import error_from_status

_DETAILS = "grpc-status-details-bin"


@lru_cache(maxsize=1024)
def problem_of_headers(block: bytes, *, last: bool) -> str:
    """Returns what is wrong by a header block, "reason: details"; empty: nothing.

    `last`: the stream ends with it, so it must have the call's status.
    """
    try:
        fields = header_fields(block)
    except (ValueError, IndexError):
        return "headers cannot be read"
    if fields.get(":status", "200") != "200":
        return f"HTTP {fields[':status']}"
    if "grpc-status" not in fields:
        return "no grpc-status" if last else ""
    return "" if fields["grpc-status"] == "0" else _failure(fields)


def _failure(fields: dict[str, str]) -> str:
    """Returns the code, the service's reason if there is one, and the message."""
    number, message = fields["grpc-status"], unquote(fields.get("grpc-message", ""))
    code = next((code.name for code in Code if str(int(code)) == number), f"code {number}")
    reason = _reason(fields[_DETAILS]) if _DETAILS in fields else ""
    return f"{code} {reason}: {message}" if reason and reason != code else f"{code}: {message}"


def _reason(details: str) -> str:
    try:
        text = base64.b64decode(details + "=" * (-len(details) % 4), validate=True)
        return error_from_status(status_pb2.Status.FromString(text)).reason
    except (binascii.Error, DecodeError):
        return ""


def by_reason(problems: Iterable[str]) -> dict[str, int]:
    """Counts problems by what comes before their details, the most frequent first."""
    return dict(Counter(map(reason_of, problems)).most_common())


def reason_of(problem: str) -> str:
    """Returns what comes before a problem's details."""
    return problem.split(":", 1)[0]
