"""What a port counts of its TLS handshakes: how they ended, and why those failed that did."""

from __future__ import annotations

import ssl
from collections.abc import Callable

from prometheus_client import Counter

OUTCOMES = ("done", "failed", "timeout", "evicted", "plaintext", "stopped")
# The names of TLS's own alerts (RFC 8446, section 6), and who ended a handshake without one of ours.
REASONS = (
    "certificate_required",
    "certificate_expired",
    "unknown_ca",
    "bad_certificate",
    "protocol_version",
    "handshake_failure",
    "client_alert",
    "closed",
    "internal_error",
)
_BY_REASON = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "certificate_required",
    "UNSUPPORTED_PROTOCOL": "protocol_version",
    "WRONG_VERSION_NUMBER": "protocol_version",
    "VERSION_TOO_LOW": "protocol_version",
}
_EXPIRED = 10  # X509_V_ERR_CERT_HAS_EXPIRED
_NO_ISSUER = (2, 18, 19, 20, 21)  # X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT, self-signed ones, ..._VERIFY_LEAF_SIGNATURE


class HandshakeCounts:
    """Counts of one port, whose `labels` come before the outcome or the reason."""

    def __init__(self, ended: Counter, failures: Counter, *labels: str) -> None:
        self._ended = {outcome: ended.labels(*labels, outcome) for outcome in OUTCOMES}
        self._failures = {reason: failures.labels(*labels, reason) for reason in REASONS}

    def watch(self, num_open: Callable[[], int]) -> None:
        """Takes what returns how many handshakes of a listener are not complete."""

    def ended(self, outcome: str) -> None:
        self._ended[outcome].inc()

    def failed(self, error: BaseException) -> None:
        self._ended["failed"].inc()
        self._failures[reason_of(error)].inc()


def reason_of(error: BaseException) -> str:
    """Returns the class of what ended a handshake: an alert of this side, the client's, or none."""
    if isinstance(error, ssl.SSLCertVerificationError):
        code = error.verify_code
        return "certificate_expired" if code == _EXPIRED else "unknown_ca" if code in _NO_ISSUER else "bad_certificate"
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return "closed"
    if isinstance(error, ssl.SSLError):
        reason = error.reason or ""
        return "client_alert" if "_ALERT_" in reason else _BY_REASON.get(reason, "handshake_failure")
    return "closed" if isinstance(error, OSError) else "internal_error"
