"""Points in time and durations, as seconds and as protobuf messages."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp


def timestamp(unix_s: float) -> Timestamp:
    whole_s, nanos = divmod(int(unix_s * 1e9), 10**9)
    return Timestamp(seconds=whole_s, nanos=nanos)


def unix_s(stamp: Timestamp) -> float:
    """Returns the Unix time of any timestamp: even an invalid one from a peer is harmless."""
    return (stamp.seconds * 10**9 + stamp.nanos) / 1e9


def seconds(message: Duration) -> float:
    """Returns the seconds of any duration, also of an invalid one from a peer."""
    return (message.seconds * 10**9 + message.nanos) / 1e9


def duration(seconds: float) -> Duration:
    """Returns the duration; a negative one becomes zero."""
    message = Duration()
    message.FromNanoseconds(max(0, round(seconds * 1e9)))
    return message
