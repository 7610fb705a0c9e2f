"""Reads server-sent events from the bytes of a response (WHATWG HTML, section 9.2), within bounds.

Only the field `data` counts: no server gives the others a meaning that we need. A line ends with LF or CRLF; a CR alone,
which the standard allows too, is none of JSON's characters and ends nothing here.
"""

from __future__ import annotations

from ryzanstein.worker.engines.remote.http.faults import EngineProtocolError

MAX_EVENT_BYTES = 1024 * 1024


class EventReader:
    """The events of one response, in the order of its bytes."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._most = max_event_bytes
        self._buffer = bytearray()
        self._searched = 0
        self._data: list[bytes] = []
        self._num_bytes = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Returns the data of the events that end in this chunk.

        Raises EngineProtocolError for an event or a line of more bytes than allowed.
        """
        events: list[bytes] = []
        self._buffer += chunk
        begin = 0
        while (end := self._buffer.find(b"\n", max(self._searched, begin))) >= 0:
            self._take(bytes(self._buffer[begin:end]).removesuffix(b"\r"), events)
            begin = end + 1
        del self._buffer[:begin]
        self._searched = len(self._buffer)
        self._require(self._num_bytes + len(self._buffer))
        return events

    def _take(self, line: bytes, events: list[bytes]) -> None:
        if not line:
            if self._data:
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
            self._data, self._num_bytes = [], 0
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._num_bytes += len(line)
            self._data.append(value.removeprefix(b" "))
        self._require(max(self._num_bytes, len(line)))

    def _require(self, num_bytes: int) -> None:
        if num_bytes > self._most:
            raise EngineProtocolError(f"an event of the stream has more than {self._most} bytes")
