"""Recorded arrivals: a file in the format of the Mooncake traces, one JSON object a line.

Qin et al., "Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving", FAST 2025. `timestamp` is in
milliseconds; `input_length` and `output_length` are in tokens; `hash_ids` are the blocks of 512 tokens of the prompt, the
same number for the same content after the same beginning. Texts are not in the file: blocks of one number get the same
words, so that prompts share what they shared when they were recorded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK_TOKENS = 512
MAX_TOKENS = 2**20
MAX_BYTES = 2**30
_FIELDS = ("timestamp", "input_length", "output_length")


class TraceFileError(ValueError):
    """A line that cannot be read; the message has its number and the field."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request: `at_s` after the first one, lengths in tokens, and its prompt's blocks; empty: they are its own."""

    at_s: float
    num_input: int
    num_output: int
    blocks: tuple[int, ...]


def read_trace(path: Path, speed: float = 1.0) -> list[TraceRow]:
    """Returns the rows, in the order of their times, which are divided by `speed`. Raises OSError or TraceFileError."""
    if (size := path.stat().st_size) > MAX_BYTES:
        raise TraceFileError(f"the file has {size} bytes; at most {MAX_BYTES} are read")
    with path.open(encoding="utf-8", errors="replace") as file:
        rows = sorted(_rows(file), key=lambda row: row.at_s)
    if not rows:
        raise TraceFileError("the file has no line")
    first_s = rows[0].at_s
    return [TraceRow((row.at_s - first_s) / speed, row.num_input, row.num_output, row.blocks) for row in rows]


def _rows(lines: Iterator[str]) -> Iterator[TraceRow]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            raise TraceFileError(f"line {number} is not JSON") from None
        if not isinstance(fields, dict):
            raise TraceFileError(f"line {number} is not a JSON object")
        at_ms, num_input, num_output = (_number(fields.get(name), name, number) for name in _FIELDS)
        yield TraceRow(at_ms / 1000, int(num_input), max(1, int(num_output)), _blocks(fields.get("hash_ids"), number))


def _number(value: object, name: str, line: int) -> float:
    most = 1e15 if name == "timestamp" else MAX_TOKENS
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise TraceFileError(f"line {line}: {name} must be a number from 0 to {most:.0f}")
    return value


def _blocks(value: object, line: int) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise TraceFileError(f"line {line}: hash_ids must be a list of integers")
    if len(value) > MAX_TOKENS // BLOCK_TOKENS:
        raise TraceFileError(f"line {line}: hash_ids has {len(value)} entries; at most {MAX_TOKENS // BLOCK_TOKENS} are read")
    return tuple(value)
