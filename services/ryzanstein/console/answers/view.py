"""An answer as tabs see it: complete blocks as trees, the block that still grows, and who wrote which part.

Each change has a version. A tab says which one it has, and gets what is new: one that was away or is slow gets it in one frame.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise, zip_longest

import msgspec

from ryzanstein.client import (
    Answer,
    ClientError,
    Ended,
    Event,
    Move,
    Moved,
    Reasoning,
    Reattached,
    Started,
    Text,
    ToolPiece,
    clean,
)
from ryzanstein.console.answers.markdown import (
    MOST_CHARS,
    MOST_OPEN,
    OUTSIDE,
    TextPiece,
    Tree,
    Within,
    flat,
    pieces,
    safe,
    tree_of,
)
from ryzanstein.console.answers.questions import calls_of
from ryzanstein.console.answers.timeline import Timeline
from ryzanstein.console.wire import AnswerFrame, AskedCall, PartRow, written

FRAME_BYTES = 192 * 1024
"""Bytes of blocks in one frame."""
ASIDE_CHARS = 64 * 1024
"""Characters of reasoning, and of calls, that are kept of an answer."""
MOST_TAIL = 4 * MOST_CHARS
"""Characters behind the open block that a tab gets before they are laid out: with each layout it gets them again."""
_JOB_CHARS = 16 * 1024
_JOINED_CHARS = 2048
_BLOCKS_AT_ONCE = 8
_ENDED = frozenset({"complete", "length", "stopped", "failed", "lost"})
_REASONS = {"stop": "complete", "tool_calls": "complete", "length": "length", "cancelled": "stopped"}


@dataclass(frozen=True, slots=True)
class LaidOut:
    """Encoded blocks, the open one, and how many characters are in that."""

    blocks: list[bytes]
    open: bytes
    num_open: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Text to lay out, in a thread: pieces that are complete, and the rest where it is short enough to be parsed each time."""

    text: str
    seams: tuple[int, ...]
    first_part: int
    pieces: tuple[TextPiece, ...]
    rest: Within
    parses_rest: bool
    final: bool

    def run(self) -> LaidOut:
        """Returns the encoded blocks, and that of the rest."""
        blocks = [self._block(each, closed=not self.final or each is not self.pieces[-1]) for each in self.pieces]
        rest = TextPiece(self.end, len(self.text), self.rest.how, OUTSIDE)
        if not self.parses_rest:
            return LaidOut(blocks, written([self.part_at(self.end), []]), 0)
        first, tree = self._tree(rest, closed=False)
        source = self.text[self.end :]
        # A paragraph loses the space at its end, which the next word needs.
        whole = flat(tree).endswith((" ", "\n"))
        return LaidOut(blocks, written([first, tree]), len(source) if whole else len(source.rstrip()))

    @property
    def end(self) -> int:
        return self.pieces[-1].end if self.pieces else 0

    def part_at(self, place: int) -> int:
        """Returns the part that writes before a place."""
        return self.first_part + sum(seam < place for seam in self.seams)

    def _block(self, piece: TextPiece, *, closed: bool) -> bytes:
        return written(self._tree(piece, closed=closed))

    def _tree(self, piece: TextPiece, *, closed: bool) -> tuple[int, Tree]:
        """Returns the first part of a piece and its tree. A seam at its end is in the next one, if there is one."""
        start, end = piece.start, piece.end
        inside = [seam - start for seam in self.seams if start <= seam < end or (not closed and seam == end)]
        return self.part_at(start), tree_of(self.text[start:end], inside, piece.how)


class Sheet:
    """One answer. It knows neither sockets nor the cluster; `take` and `commit` belong to one event loop."""

    def __init__(self, answer_id: str) -> None:
        self.answer_id, self.version, self.status, self.note, self.figures, self.model = answer_id, 1, "waiting", "", "", ""
        self.parts: list[PartRow] = []
        self.generation_id, self.prompt_tokens = "", 0
        self.asked_at, self.timeline, self._clock = time.time(), Timeline(), time.monotonic()
        self.num_chars = 0
        self.cut = False
        self._parts_stamp = 1
        self._blocks: list[msgspec.Raw] = []
        self._stamps: list[int] = []
        self._source, self._seams = "", list[int]()
        self._first_part, self._within = 0, OUTSIDE
        self._open, self._open_stamp = msgspec.Raw(written([0, []])), 1
        self._laid = self._parsed = 0
        self._tail_ends: list[tuple[int, int]] = []
        self._reasoning, self._calls = _Pieces(), _Pieces()
        self._asked: list[AskedCall] = []
        self._digest = sha256()
        self._return = ""
        self._move: Move | None = None
        self._ending = ""

    @property
    def over(self) -> bool:
        return self.status in _ENDED

    def says(self, text: str) -> bool:
        """Returns whether this is the text of the answer, as the cluster has it."""
        return self._digest.digest() == sha256(text.encode(errors="replace")).digest()

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    def take(self, event: Event) -> None:
        """Adds an event of the answer."""
        self.version += 1
        match event:
            case Started():
                self.model, self.generation_id, self.prompt_tokens = event.model, event.generation_id, event.prompt_tokens
                self.status = "streaming" if self.status == "waiting" else self.status
            case Text(choice=0):
                self._write(event)
            case Reasoning():
                self._reasoning.add(self.version, clean(event.text))
            case ToolPiece():
                self._calls.add(self.version, clean(f"\n{event.name} {event.arguments}" if event.id else event.arguments))
            case Moved(move):
                self._move = move
            case Reattached(router):
                self.note = f"connection lost; the answer goes on at {clean(router)}"
            case Ended(choice=0):
                self._parts_stamp = self.version
                self._ending = _REASONS.get(event.finish_reason, "complete")

    def stop(self) -> None:
        """Notes that a person wants the end; it is shown as ended when the cluster has confirmed it."""
        if not self.over:
            self.version += 1
            self.status = "stopping"

    def end(self, answer: Answer) -> None:
        """Notes the end of the stream."""
        self.version += 1
        self.status = self._ending or "complete"
        self.figures, self._asked = _figures(answer), calls_of(answer.tool_calls)
        self._parts_stamp = self.version

    def fail(self, error: ClientError) -> None:
        """Notes what the answer failed with."""
        self._ended_with("failed", clean(error.message)[:2000])

    def lose(self, note: str) -> None:
        """Notes that nobody reads the answer any more."""
        self._ended_with("lost", note)

    def _ended_with(self, status: str, note: str) -> None:
        self.version += 1
        self.status, self.note = status, note
        self._parts_stamp = self.version

    def _write(self, event: Text) -> None:
        if not self.parts or self.parts[-1].node != event.node:
            self._begin_part(event.node)
        self.parts[-1].tokens += len(event.token_ids)
        self.timeline.add(round((time.monotonic() - self._clock) * 1e3), len(self.parts) - 1, len(event.token_ids))
        if event.text:
            self._digest.update(event.text.encode(errors="replace"))
            self._append(event.text)

    def _begin_part(self, node: str) -> None:
        move, self._move = self._move, None
        row = PartRow(clean(node))
        if move is not None and self.parts:
            row.silence_ms, row.cause = round(move.silence_s * 1e3, 1), clean(move.cause)
        if self.parts:
            self._seams.append(len(self._source))
        self.parts.append(row)
        self._parts_stamp = self.version

    def _append(self, text: str) -> None:
        text = self._return + text
        self._return = "\r" if text.endswith("\r") else ""  # half of a line end, perhaps
        text = safe(text.removesuffix("\r"))
        if self.cut or not text:
            return
        self._source += text
        self.num_chars += len(text)
        self._tail_ends.append((self.version, len(self._source)))

    @property
    def is_behind(self) -> bool:
        """Whether more text waits for its layout than is laid out at once."""
        return len(self._source) > _JOB_CHARS + MOST_CHARS

    def give_up_text(self) -> None:
        """Keeps no more of the text: the answer is longer than the console keeps."""
        self.cut = True
        self.note = "the answer is longer than the console keeps; the cluster has all of it"

    def layout(self, *, watched: bool) -> Layout | None:
        """Returns what is to be laid out now; None: nothing. `watched`: somebody sees the block that still grows."""
        window = self._source[: _JOB_CHARS + MOST_CHARS]
        whole = len(window) == len(self._source)
        found = pieces(window, self._within, final=self.over and whole)
        taken = [each for each in found if each is found[0] or each.end <= _JOB_CHARS]
        rest = taken[-1].after if taken else self._within
        left = len(self._source) - (taken[-1].end if taken else 0)
        parses = watched and 0 < left <= MOST_OPEN
        if not taken and (not parses or self._parsed == len(self._source)):
            return None
        final = self.over and left == 0
        return Layout(
            self._source if whole else window, tuple(self._seams), self._first_part, tuple(taken), rest, parses, final
        )

    def commit(self, job: Layout, laid_out: LaidOut) -> None:
        """Takes what was laid out. Text that came meanwhile follows the open block."""
        for block in laid_out.blocks:
            self.version += 1
            self._stamps.append(self.version)
            self._blocks.append(msgspec.Raw(block))
        end = job.end
        self.version += 1
        self._open, self._open_stamp = msgspec.Raw(laid_out.open), self.version
        passed = [seam for seam in self._seams if seam < end or (job.final and seam == end)]
        self._first_part += len(passed)
        self._seams = [seam - end for seam in self._seams[len(passed) :]]
        self._source = self._source[end:]
        self._laid, self._parsed = laid_out.num_open, len(job.text) - end if job.parses_rest else 0
        self._within = job.rest if job.pieces else self._within
        self._tail_ends = [(self.version, len(self._source))]

    def frame(self, version: int) -> AnswerFrame | None:
        """Returns what is new behind a version; None: nothing."""
        if version >= self.version:
            return None
        first = bisect_right(self._stamps, version)
        num_bytes, last = 0, first
        while last < len(self._blocks) and (last == first or num_bytes < FRAME_BYTES):
            num_bytes += len(bytes(self._blocks[last]))
            last += 1
        made = AnswerFrame(self.answer_id, self.version, self.status, self._blocks[first:last])
        made.tokens, made.model = self.tokens, self.model
        if self._parts_stamp > version:
            made.parts, made.asked = self.parts, self._asked or None
        if last < len(self._blocks):
            made.version, made.more = self._stamps[last - 1], True
            made.status = "streaming"
            made.parts = self.parts
            return made
        made.note, made.figures = self.note, self.figures
        made.open = self._open if self._open_stamp > version else None
        made.tail = self._tail(version)
        made.reasoning, made.calls = self._reasoning.since(version), self._calls.since(version)
        return made

    def _tail(self, version: int) -> list[tuple[int, str]]:
        """Returns the text behind the open block that is new behind a version, with its parts, up to a bound."""
        start, end = self._laid, min(len(self._source), self._laid + MOST_TAIL)
        if version >= self._open_stamp:
            known = bisect_right(self._tail_ends, (version, len(self._source) + 1))
            start = min(end, max(start, self._tail_ends[known - 1][1] if known else start))
        ends = [start, *(seam for seam in self._seams if start < seam < end), end]
        part = self._first_part + sum(seam <= start for seam in self._seams)
        texts = [self._source[begin:end] for begin, end in pairwise(ends)]
        return [(part + number, text) for number, text in enumerate(texts) if text]


class _Pieces:
    """A text that only grows, up to a bound, with the version at which each piece came."""

    def __init__(self) -> None:
        self._versions: list[int] = []
        self._texts: list[str] = []
        self._num_chars = 0

    def add(self, version: int, text: str) -> None:
        text = text[: max(0, ASIDE_CHARS - self._num_chars)]
        if text:
            self._num_chars += len(text)
            self._versions.append(version)
            self._texts.append(text)

    def since(self, version: int) -> str:
        return "".join(self._texts[bisect_right(self._versions, version) :])


def blocks_of(text: str) -> Iterator[list[bytes]]:
    """Yields the blocks of an answer of which nobody knows any more who wrote it, a few at a time: parsing takes a while.

    Small blocks are one: nothing follows in which they could grow.
    """
    text = safe(text)
    made: list[bytes] = []
    start = 0
    found = pieces(text, final=True)
    for each, after in zip_longest(found, found[1:]):
        joins = after is not None and each.how == after.how == "markdown" and after.end - start <= _JOINED_CHARS
        if not joins:
            made.append(written([-1, tree_of(text[start : each.end], (), each.how)]))
            start = each.end
        if len(made) == _BLOCKS_AT_ONCE:
            yield made
            made = []
    yield made


def _figures(answer: Answer) -> str:
    """Returns the line below an answer."""
    first = answer.time_to_first_token_s
    said = [] if first is None else [f"first token {first * 1e3:.0f} ms"]
    if answer.tokens_per_s:
        said.append(f"{answer.tokens_per_s:.0f} tokens/s")
    if answer.reattaches:
        said.append(f"re-attached {answer.reattaches}x")
    return ", ".join(said)
