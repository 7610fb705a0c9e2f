"""The document that `ryzanstein bench kv` writes, and continues if it was interrupted."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ryzanstein import errors
from ryzanstein.lab.bench.quality.document import GreedyMatch, QualityMachine, QualityText, WindowSums

SCHEMA = "ryzanstein.bench.kv/1"
_MAX_BYTES = 64 * 2**20


class KvSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every row was measured with. `every`: one of so many tokens of a window is scored."""

    model: str
    texts: list[QualityText]
    options: list[str]
    windows: list[int]
    num_windows: int
    every: int
    prompts: int
    prompt_tokens: int
    new_tokens: int
    pass_key_contexts: list[int]
    batches: list[int]
    contexts: list[int]
    threads: int
    sparse: list[str] = []


class MemoryRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes of a token over all layers, once its page is cold."""

    option: str
    bytes_per_token: float


class WindowRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sums of all options over one window of a text."""

    length: int
    text: str
    number: int
    sums: list[WindowSums]


class GreedyRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the options answer one prompt, next to the reference."""

    text: str
    number: int
    matches: list[GreedyMatch]


class PassKeyRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which options say the key that stands at a depth of a text of so many tokens."""

    context: int
    depth: float
    found: list[bool]


class SparseRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What each rule of sparse attention gives, dense first.

    `what`: "pass key" at a depth or "needle" by its number, 1 if found; "reading" of a prompt and
    "step" after it, in seconds.
    """

    what: str
    context: int
    place: float
    found: list[float]


class TimeRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Medians of one call of attention for single new tokens, in seconds, by kind of cache."""

    shape: str
    batch: int
    context: int
    seconds: dict[str, float]


class OutlierRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The error of an answer of attention, relative to its size, with one channel of keys so many times as large."""

    factor: float
    errors: dict[str, float]


class KvDocument(msgspec.Struct, forbid_unknown_fields=True):
    """All that was measured. Rows are in the order in which they were."""

    schema: str
    machine: QualityMachine
    settings: KvSettings
    memory: list[MemoryRow] = []
    times: list[TimeRow] = []
    outliers: list[OutlierRow] = []
    windows: list[WindowRow] = []
    greedy: list[GreedyRow] = []
    pass_keys: list[PassKeyRow] = []
    sparse_windows: list[WindowRow] = []
    sparse: list[SparseRow] = []


def read_kv(path: Path) -> KvDocument:
    """Reads a document. Raises INVALID_ARGUMENT with the file, and the field that is wrong."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise errors.invalid(str(path), f"must have at most {_MAX_BYTES} bytes", path.stat().st_size)
        document = msgspec.json.decode(path.read_bytes(), type=KvDocument)
    except (OSError, msgspec.DecodeError) as error:
        raise errors.invalid(str(path), str(error)) from error
    if document.schema != SCHEMA:
        raise errors.invalid(f"{path}: schema", f"must be {SCHEMA}", document.schema)
    return document
