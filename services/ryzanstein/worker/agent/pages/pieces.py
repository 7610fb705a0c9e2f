"""Pages on the wire: in pieces below the message limit, put together and checked on the other side."""

from __future__ import annotations

from collections.abc import Iterator

from ryzanstein import errors
from ryzanstein.v1 import pages_pb2 as pb
from ryzanstein.worker.agent.pages.page import ROOT_BYTES, Page, PageSizes
from ryzanstein.worker.engine.travel import NAME_BYTES

PIECE_BYTES = 2**20
MAX_KEYS = 4096


def pieces_of(page: Page, root: bytes, piece_bytes: int = PIECE_BYTES) -> Iterator[pb.PagePiece]:
    """Yields the page in pieces."""
    content, size = page.content, len(page.content)
    for start in range(0, size, piece_bytes):
        last = start + piece_bytes >= size
        yield pb.PagePiece(
            key=page.key if start == 0 else b"",
            content=content[start : start + piece_bytes],
            checksum=page.checksum(root) if last else None,
        )


class CorruptPage(Exception):
    """A page whose checksum is wrong."""


class Assembly:
    """Puts the pieces of pages together."""

    def __init__(self, root: bytes, sizes: PageSizes) -> None:
        self._root, self._sizes = root, sizes
        self._key = b""
        self._content = bytearray()

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
    return keys


def checked_root(root: bytes) -> bytes:
    """Returns the root. Raises INVALID_ARGUMENT."""
    if len(root) != ROOT_BYTES:
        raise errors.invalid("scope.root", f"must have {ROOT_BYTES} bytes", len(root))
    return root
