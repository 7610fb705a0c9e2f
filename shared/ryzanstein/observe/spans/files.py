"""Spans in files, for `ryzanstein trace` where there is no collector: a line of OTLP JSON for each batch.

See the OTLP File Exporter specification. A full file is renamed once, so that the two together are bounded.
"""

from __future__ import annotations

import json
import logging
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from ryzanstein.files.private_files import private_folder

MOST_BYTES = 16 * 2**20
SUFFIX, OLDER = ".jsonl", ".jsonl.1"
_IDS = ("traceId", "spanId", "parentSpanId")
_log = logging.getLogger(__name__)


class SpanFile(SpanExporter):
    """Writes to `folder/NAME.jsonl`, from one thread. Raises OSError if that is not possible."""

    def __init__(self, folder: Path, name: str, most_bytes: int = MOST_BYTES) -> None:
        private_folder(folder)
        stem = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name)
        self._path, self._older, self._most = folder / f"{stem}{SUFFIX}", folder / f"{stem}{OLDER}", most_bytes
        self._file = self._path.open("ab", buffering=0)
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Appends a line. What a full disk refuses is lost, and logged once."""
        line = json.dumps(_readable(MessageToDict(encode_spans(spans))), separators=(",", ":")).encode() + b"\n"
        try:
            if self._file.tell() + len(line) > self._most:
                self._file.close()
                self._path.replace(self._older)
                self._file = self._path.open("ab", buffering=0)
            self._file.write(line)
        except (OSError, ValueError) as error:  # ValueError: it could not be opened again
            if not self._failing:
                _log.warning("spans cannot be written to %s: %s", self._path, error)
            self._failing = True
            return SpanExportResult.FAILURE
        self._failing = False
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._file.close()


def _readable(request: dict[str, Any]) -> dict[str, Any]:
    """Returns OTLP JSON: its ids are hexadecimal, where JSON of other messages has base64."""
    for resource in request.get("resourceSpans", ()):
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                for each in (span, *span.get("links", ())):
                    each.update({name: b64decode(each[name]).hex() for name in _IDS if name in each})
    return request
