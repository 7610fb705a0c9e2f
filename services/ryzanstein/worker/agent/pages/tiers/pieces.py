"""Pages on the wire: several in a message, or one in pieces below the message limit; checked on the other side.

A message costs both sides about as much as the copying of a page does, so small pages go together. An
older node takes pieces alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

from ryzanstein import errors
from ryzanstein.v1 import pages_pb2 as pb
from ryzanstein.worker.agent.pages.page import ROOT_BYTES, Page, PageSizes
from ryzanstein.worker.engine.memory.travel import NAME_BYTES

PIECE_BYTES = 2**20
WHOLE_BYTES = 2**20  # of content in one message of whole pages
MAX_KEYS = 4096
ANSWER_BYTES = 64 * 2**20  # of content in one answer; the caller asks again for the others


def pieces_of(page: Page, root: bytes, piece_bytes: int = PIECE_BYTES) -> Iterator[pb.PagePiece]:
    """Yields the page in pieces."""
    content, size = page.content, len(page.content)
    for start in range(0, size, piece_bytes):
        last = start + piece_bytes >= size
        yield pb.PagePiece(
            key=page.key if start == 0 else b"",
            content=bytes(content[start : start + piece_bytes]),
            checksum=page.checksum(root) if last else None,
        )


_Frame = TypeVar("_Frame", pb.SendPagesRequest, pb.FetchPagesResponse)


def frames_of(frame: type[_Frame], pages: Sequence[Page], root: bytes, sizes: PageSizes, whole_bytes: int) -> Iterator[_Frame]:
    """Yields messages with the pages in order: as many in each as fit into `whole_bytes`, the others in pieces."""
    while pages:
        num = sizes.fit((page.key for page in pages), whole_bytes)
        some, pages = pages[:num], pages[num:]
        if sum(len(page.content) for page in some) <= whole_bytes:
            yield _whole(frame(), some, root)
        else:
            yield from (frame(piece=piece) for page in some for piece in pieces_of(page, root))


def _whole(frame: _Frame, pages: Sequence[Page], root: bytes) -> _Frame:
    whole = frame.pages  # filled in place: it is large
    whole.keys.extend(page.key for page in pages)
    whole.contents = b"".join(page.content for page in pages)
    whole.checksums.extend(page.checksum(root) for page in pages)
    return frame


def whole_pages(whole: pb.WholePages, root: bytes, sizes: PageSizes) -> Iterator[Page]:
    """Yields the pages of a message. They share its memory.

    Raises INVALID_ARGUMENT for what are no pages of their sizes, CorruptPage at a page whose checksum is
    wrong.
    """
    contents = memoryview(whole.contents)
    if len(contents) > WHOLE_BYTES:
        raise errors.invalid("pages.contents", f"must have at most {WHOLE_BYTES} bytes", len(contents))
    if len(whole.keys) != len(whole.checksums) or not whole.keys:
        raise errors.invalid("pages.keys", "must be as many as checksums, and at least one", len(whole.keys))
    if any(len(key) != NAME_BYTES for key in whole.keys):
        raise errors.invalid("pages.keys", f"each must have {NAME_BYTES} bytes")
    ends = [0, *accumulate(map(sizes.of, whole.keys))]
    if ends[-1] != len(contents):
        raise errors.invalid("pages.contents", f"pages of these groups must have {ends[-1]} bytes", len(contents))
    for key, checksum, (start, end) in zip(whole.keys, whole.checksums, pairwise(ends), strict=True):
        page = Page(key, contents[start:end])
        if page.checksum(root) != checksum:
            raise CorruptPage
        yield page


class CorruptPage(Exception):
    """A page whose checksum is wrong."""


class Assembly:
    """Puts the pieces of pages together."""

    def __init__(self, root: bytes, sizes: PageSizes) -> None:
        self._root, self._sizes = root, sizes
        self._key = b""
        self._content = bytearray()

    @property
    def whole(self) -> bool:
        """Whether no page has been begun and not completed."""
        return not self._key

    def add(self, piece: pb.PagePiece) -> Page | None:
        """Returns the page that the piece completes.

        Raises INVALID_ARGUMENT for pieces that are no page of its size, CorruptPage for a page
        whose checksum is wrong.
        """
        if piece.key:
            if self._content or len(piece.key) != NAME_BYTES:
                raise errors.invalid("piece.key", f"must have {NAME_BYTES} bytes, and begin a page", len(piece.key))
            self._key = piece.key
        if not self._key:
            raise errors.invalid("piece.key", "must be in the first piece of a page")
        self._content += piece.content
        whole, size = piece.HasField("checksum"), self._sizes.of(self._key)
        if len(self._content) > size or (whole and len(self._content) != size):
            raise errors.invalid("piece.content", f"a page of this group must have {size} bytes", len(self._content))
        if not whole:
            return None
        page = Page(self._key, bytes(self._content))
        self._key, self._content = b"", bytearray()
        if page.checksum(self._root) != piece.checksum:
            raise CorruptPage
        return page


def checked_keys(keys: list[bytes]) -> list[bytes]:
    """Returns the keys of a request. Raises INVALID_ARGUMENT."""
    if len(keys) > MAX_KEYS:
        raise errors.invalid("keys", f"must have at most {MAX_KEYS} entries", len(keys))
    if any(len(key) != NAME_BYTES for key in keys):
        raise errors.invalid("keys", f"each must have {NAME_BYTES} bytes")
    if len(set(keys)) < len(keys):
        raise errors.invalid("keys", "must be different from one another", len(keys) - len(set(keys)))
    return keys


def checked_root(root: bytes) -> bytes:
    """Returns the root. Raises INVALID_ARGUMENT."""
    if len(root) != ROOT_BYTES:
        raise errors.invalid("scope.root", f"must have {ROOT_BYTES} bytes", len(root))
    return root
