"""Pages in pieces: whole again, or not believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.errors import RyzansteinError
from ryzanstein.v1 import pages_pb2 as pb
from ryzanstein.worker.agent.pages.page import Page, PageSizes, root_of
from ryzanstein.worker.agent.pages.tiers.pieces import (
    Assembly,
    CorruptPage,
    checked_keys,
    checked_root,
    frames_of,
    pieces_of,
    whole_pages,
)


def assembled(pages, root, sizes, piece_bytes=1000, other_root=None):
    assembly = Assembly(other_root or root, sizes)
    return [page for sent in pages for piece in pieces_of(sent, root, piece_bytes) if (page := assembly.add(piece))]


@pytest.mark.parametrize("piece_bytes", [1, 1000, 4096, 2**20])
def test_pieces_make_the_same_pages(chain, scope, piece_bytes) -> None:
    pages = chain(3)
    assert assembled(pages, scope.root, scope.sizes, piece_bytes) == pages


def test_one_flipped_bit_anywhere_is_found(chain, scope) -> None:
    (page,) = chain(1)
    pieces = list(pieces_of(page, scope.root, 1000))
    for place in (0, 2, len(pieces) - 1):
        damaged = [type(piece).FromString(piece.SerializeToString()) for piece in pieces]
        damaged[place].content = bytes([damaged[place].content[0] ^ 1]) + damaged[place].content[1:]
        assembly = Assembly(scope.root, scope.sizes)
        with pytest.raises(CorruptPage):
            [assembly.add(piece) for piece in damaged]


def test_a_page_under_another_key_or_root_is_not_believed(chain, scope) -> None:
    one, two = chain(2)
    pieces = list(pieces_of(one, scope.root, 1000))
    pieces[0].key = two.key
    assembly = Assembly(scope.root, scope.sizes)
    with pytest.raises(CorruptPage):
        [assembly.add(piece) for piece in pieces]
    with pytest.raises(CorruptPage):
        assembled([one], scope.root, scope.sizes, other_root=root_of(b"other", "format", ""))


def test_what_is_no_page_of_this_size_is_refused_before_it_is_held(chain, scope) -> None:
    (page,) = chain(1)
    for size in (scope.sizes.block_bytes - 1, scope.sizes.block_bytes + 1):
        with pytest.raises(RyzansteinError, match=r"must have \d+ bytes"):
            assembled([page], scope.root, PageSizes(size))
    first, *rest = pieces_of(page, scope.root, 1000)
    with pytest.raises(RyzansteinError, match="first piece"):
        Assembly(scope.root, scope.sizes).add(rest[0])
    first.key = b"short"
    with pytest.raises(RyzansteinError, match="17 bytes"):
        Assembly(scope.root, scope.sizes).add(first)


def test_a_hot_page_has_a_size_of_its_own(scope) -> None:
    sizes = PageSizes(100, hot_bytes=700, hot_group=2)
    pages = [Page(bytes(16) + bytes([group]), bytes(sizes.of(bytes(16) + bytes([group])))) for group in range(3)]
    assert [len(page.content) for page in pages] == [100, 100, 700]
    assert assembled(pages, scope.root, sizes, 64) == pages
    with pytest.raises(RyzansteinError, match="700 bytes"):
        assembled([Page(pages[2].key, bytes(100))], scope.root, sizes)
    assert sizes.largest == 700
    assert [sizes.fit([page.key for page in pages], most) for most in (0, 100, 200, 899, 900)] == [1, 1, 2, 2, 3]
    assert sizes.fit([], 100) == 0


def test_roots_differ_by_weights_format_and_tenant() -> None:
    roots = {
        root_of(*parts) for parts in [(b"w", "f", "t"), (b"v", "f", "t"), (b"w", "g", "t"), (b"w", "f", "u"), (b"wf", "", "t")]
    }
    assert len(roots) == 5


def test_keys_and_roots_of_other_lengths_and_keys_that_come_twice_are_refused() -> None:
    many = [number.to_bytes(17, "big") for number in range(4097)]
    for wrong in ([b"k"], many, [*many[:9], many[3]]):
        with pytest.raises(RyzansteinError):
            checked_keys(wrong)
    assert checked_keys(many[:4096]) == many[:4096]
    with pytest.raises(RyzansteinError):
        checked_root(b"")


@given(st.lists(st.integers(1, 900), max_size=12), st.integers(0, 2000))
def test_pages_of_any_sizes_arrive_as_they_left_whatever_fits_into_a_message(sizes: list[int], whole_bytes: int) -> None:
    root, of_groups = b"r" * 16, Groups(sizes)
    pages = [Page(bytes(16) + bytes([group]), bytes([group]) * size) for group, size in enumerate(sizes)]
    assembly, arrived = Assembly(root, of_groups), []
    for frame in frames_of(pb.SendPagesRequest, pages, root, of_groups, whole_bytes):
        if frame.HasField("pages"):
            assert len(frame.pages.contents) <= whole_bytes
            arrived += whole_pages(frame.pages, root, of_groups)
        elif (page := assembly.add(frame.piece)) is not None:
            arrived.append(page)
    assert arrived == pages


class Groups(PageSizes):
    """Sizes by the number of a group."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(0)
        object.__setattr__(self, "sizes", sizes)

    def of(self, key: bytes) -> int:
        return self.sizes[key[-1]]
