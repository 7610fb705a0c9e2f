"""What can go wrong with an inference server, by what follows from it."""

from __future__ import annotations

import msgspec

_MAX_TEXT = 400
"""Characters of a server's text that go into a message."""


class EngineFault(Exception):
    """The base of all faults of an inference server."""


class EngineUnreachable(EngineFault):
    """The server did not answer, broke off, or failed: another one, or this one later, may do it."""


class EngineProtocolError(EngineFault):
    """The server answered what no such server should: nothing of this answer can be trusted."""


class EngineRefused(EngineFault):
    """The server does not do what it was asked. The same request is refused again.

    `status` is that of HTTP; 0: no server was asked.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class EngineBusy(EngineFault):
    """The server takes no request now. `retry_after_s`: when it asks to be tried again, in seconds; None: it does not say."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class _Reported(msgspec.Struct):
    message: str = ""


class _ReportedBody(msgspec.Struct):
    error: _Reported | str | None = None
    message: str = ""
    detail: str | None = None


def clean(text: bytes | str) -> str:
    """Returns text of a server as one line of printable characters, bounded."""
    whole = text[: 8 * _MAX_TEXT].decode(errors="replace") if isinstance(text, bytes) else text[: 8 * _MAX_TEXT]
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in whole).split())
    return line if len(line) <= _MAX_TEXT else line[:_MAX_TEXT] + "..."


def reported_text(body: bytes) -> str:
    """Returns what a server says of an error: the message in its JSON, or the body as it is; cleaned."""
    try:
        found = msgspec.json.decode(body, type=_ReportedBody)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return clean(body)
    message = found.error.message if isinstance(found.error, _Reported) else found.error
    return clean(message or found.message or found.detail or body)


def reported_in_stream(error: object) -> EngineFault:
    """Returns the fault for an error that a server reports in the middle of a stream."""
    text = clean(error) if isinstance(error, str) else "no reason is given"
    status = 0
    if isinstance(error, dict):
        text = clean(str(error.get("message", error)))
        status = next((code for name in ("code", "status_code") if isinstance(code := error.get(name), int)), 0)
    return fault_of(status, f"the engine reports an error: {text}")


def fault_of(status: int, message: str, retry_after_s: float | None = None) -> EngineFault:
    """Returns the fault for a status of HTTP that is not 200."""
    if status in (429, 503):
        return EngineBusy(message, retry_after_s)
    if 300 <= status < 500:
        return EngineRefused(message, status)
    return EngineUnreachable(message)
