"""Points in time, as Unix seconds and as protobuf timestamps."""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp


def timestamp(unix_s: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromNanoseconds(int(unix_s * 1e9))
    return stamp


def unix_s(stamp: Timestamp) -> float:
    """Returns the Unix time of any timestamp: even an invalid one from a peer is harmless."""
    return (stamp.seconds * 10**9 + stamp.nanos) / 1e9
