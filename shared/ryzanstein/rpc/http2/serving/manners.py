"""What a server takes from one client: how often it may ping, reset and send what costs work and says nothing.

Bounds against CVE-2019-9512 to 9518 and CVE-2023-44487 (rapid reset).
"""

from __future__ import annotations

from ryzanstein.rpc.http2.frames import ErrorCode, Http2Error

_MAX_STRIKES = 2
# A proxy whose clients all leave at once resets many calls.
_MAX_RESETS, _RESETS_PER_S = 4000, 500.0
_MAX_EMPTY, _EMPTY_PER_S = 4000, 1000.0


class TooManyPingsError(Http2Error):
    """A client pings more often than is permitted."""

    def __init__(self) -> None:
        # The text by which clients of gRPC know that they must ping less often (gRFC A8).
        super().__init__(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")


class _Budget:
    """Permits `most` at once, and `per_s` more in each second."""

    def __init__(self, most: float, per_s: float) -> None:
        self._most, self._per_s = most, per_s
        self._left, self._at = most, 0.0

    def spend(self, now: float) -> bool:
        """Returns False if there is nothing left."""
        self._left = min(self._most, self._left + (now - self._at) * self._per_s) - 1
        self._at = now
        return self._left >= 0


class Manners:
    """Judges one connection. Times come from one monotonic clock in seconds."""

    def __init__(self, min_ping_interval_s: float) -> None:
        self._min_ping_interval_s = min_ping_interval_s
        self._pinged_at = -min_ping_interval_s
        self._strikes = 0
        self._resets = _Budget(_MAX_RESETS, _RESETS_PER_S)
        self._empty = _Budget(_MAX_EMPTY, _EMPTY_PER_S)

    def answered(self) -> None:
        """Records that the client got data: who asks, and is answered, may ping."""
        self._strikes = 0
        self._pinged_at = -self._min_ping_interval_s

    def pinged(self, now: float) -> None:
        """Raises TooManyPingsError."""
        if now - self._pinged_at < self._min_ping_interval_s:
            self._strikes += 1
            if self._strikes > _MAX_STRIKES:
                raise TooManyPingsError
        self._pinged_at = now

    def reset(self, now: float) -> None:
        """Records that the client reset a call that ran. Raises Http2Error."""
        if not self._resets.spend(now):
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "too many calls are reset")

    def said_nothing(self, now: float) -> None:
        """Records a frame that carries nothing: settings, priorities, empty data. Raises Http2Error."""
        if not self._empty.spend(now):
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that carry nothing")
