from __future__ import annotations

import pytest

from ryzanstein.errors import RyzansteinError
from ryzanstein.lab.bench.engine.collectives.byte_sizes import parse_sizes, show_size


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("12", (12,)),
        ("8KiB", (8192,)),
        ("1MiB, 2 KiB,2048", (2048, 2**20)),
        ("2KiB..16KiB", (2048, 4096, 8192, 16384)),
        ("3KiB..16KiB", (3072, 6144, 12288)),
        ("1GiB..1GiB,4B", (4, 2**30)),
    ],
)
def test_sizes_are_listed_in_bytes_ascending_and_once(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must be like"),
        ("8kb", "must be like"),
        ("-8", "must be like"),
        ("8KiB..", "must be like"),
        ("1KiB,,2KiB", "must be like"),
        ("8KiB..2KiB", "a range must ascend"),
        ("0", "must be 1 to 1073741824 bytes"),
        ("2GiB", "must be 1 to 1073741824 bytes"),
    ],
)
def test_what_is_no_size_is_refused_naming_the_bound(text: str, why: str) -> None:
    with pytest.raises(RyzansteinError, match=f"sizes: {why}"):
        parse_sizes(text)


def test_sizes_are_shown_in_the_largest_unit_that_divides_them() -> None:
    assert [show_size(n) for n in (12, 2048, 2052, 2**20, 3 * 2**29)] == ["12 B", "2 KiB", "2052 B", "1 MiB", "1536 MiB"]
