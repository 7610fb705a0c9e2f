"""Pages in pieces: whole again, or not believed."""

from __future__ import annotations

import pytest

from ryzanstein.errors import RyzansteinError
from ryzanstein.worker.agent.pages.page import root_of
from ryzanstein.worker.agent.pages.pieces import Assembly, CorruptPage, checked_keys, checked_root, pieces_of


def assembled(pages, root, page_bytes, piece_bytes=1000, other_root=None):
    assembly = Assembly(other_root or root, page_bytes)
    return [page for sent in pages for piece in pieces_of(sent, root, piece_bytes) if (page := assembly.add(piece))]


@pytest.mark.parametrize("piece_bytes", [1, 1000, 4096, 2**20])
def test_pieces_make_the_same_pages(chain, scope, piece_bytes) -> None:
    pages = chain(3)
    assert assembled(pages, scope.root, scope.page_bytes, piece_bytes) == pages


def test_one_flipped_bit_anywhere_is_found(chain, scope) -> None:
    (page,) = chain(1)
    pieces = list(pieces_of(page, scope.root, 1000))
    for place in (0, 2, len(pieces) - 1):
        damaged = [type(piece).FromString(piece.SerializeToString()) for piece in pieces]
        damaged[place].content = bytes([damaged[place].content[0] ^ 1]) + damaged[place].content[1:]
        assembly = Assembly(scope.root, scope.page_bytes)
        with pytest.raises(CorruptPage):
            [assembly.add(piece) for piece in damaged]


def test_a_page_under_another_key_or_root_is_not_believed(chain, scope) -> None:
    one, two = chain(2)
    pieces = list(pieces_of(one, scope.root, 1000))
    pieces[0].key = two.key
    assembly = Assembly(scope.root, scope.page_bytes)
    with pytest.raises(CorruptPage):
        [assembly.add(piece) for piece in pieces]
    with pytest.raises(CorruptPage):
        assembled([one], scope.root, scope.page_bytes, other_root=root_of(b"other", "format", ""))


def test_what_is_no_page_of_this_size_is_refused_before_it_is_held(chain, scope) -> None:
    (page,) = chain(1)
    for size in (scope.page_bytes - 1, scope.page_bytes + 1):
        with pytest.raises(RyzansteinError, match=r"must have \d+ bytes"):
            assembled([page], scope.root, size)
    first, *rest = pieces_of(page, scope.root, 1000)
    with pytest.raises(RyzansteinError, match="first piece"):
        Assembly(scope.root, scope.page_bytes).add(rest[0])
    first.key = b"short"
    with pytest.raises(RyzansteinError, match="17 bytes"):
        Assembly(scope.root, scope.page_bytes).add(first)


def test_roots_differ_by_weights_format_and_tenant() -> None:
    roots = {
        root_of(*parts) for parts in [(b"w", "f", "t"), (b"v", "f", "t"), (b"w", "g", "t"), (b"w", "f", "u"), (b"wf", "", "t")]
    }
    assert len(roots) == 5


def test_keys_and_roots_of_other_lengths_are_refused() -> None:
    for wrong in ([b"k"] * 1, [bytes(17)] * 4097):
        with pytest.raises(RyzansteinError):
            checked_keys(wrong)
    with pytest.raises(RyzansteinError):
        checked_root(b"")
