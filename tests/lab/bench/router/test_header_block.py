"""Header blocks: the examples of RFC 7541, and what is broken."""

from __future__ import annotations

import pytest

from ryzanstein.lab.bench.router.load.call_end import problem_of_headers
from ryzanstein.lab.bench.router.load.header_block import header_fields

HUFFMAN_DATE = "d07abe941054d444a8200595040b8166e082a62d1bff"


@pytest.mark.parametrize(
    ("block", "fields"),
    [
        ("400a637573746f6d2d6b65790d637573746f6d2d686561646572", {"custom-key": "custom-header"}),  # C.2.1
        ("100870617373776f726406736563726574", {"password": "secret"}),  # C.2.3
        ("88", {":status": "200"}),
        ("20" + "4882" + "6402", {":status": "302"}),  # C.6.1, after the size of the table was set
        ("0088" + "25a849e95ba97d7f" + "96" + HUFFMAN_DATE, {"custom-key": "Mon, 21 Oct 2013 20:13:21 GMT"}),
        ("0f0d02" + "3132" + "88", {":status": "200"}),  # a name that is not known here
    ],
)
def test_fields_are_read_as_the_standard_says(block: str, fields: dict[str, str]) -> None:
    assert header_fields(bytes.fromhex(block)) == fields


@pytest.mark.parametrize("block", ["00", "0003616263", "00036162", "ff", "0085"])
def test_a_broken_block_is_a_problem(block: str) -> None:
    assert problem_of_headers(bytes.fromhex(block), last=True) == "headers cannot be read"


def literal(*fields: tuple[str, str]) -> bytes:
    return b"".join(bytes((0, len(n))) + n.encode() + bytes((len(v),)) + v.encode() for n, v in fields)


@pytest.mark.parametrize(
    ("block", "last", "problem"),
    [
        (b"\x88", False, ""),
        (b"\x88", True, "no grpc-status"),
        (literal(("grpc-status", "0")), True, ""),
        (literal((":status", "502")), False, "HTTP 502"),
        (literal(("grpc-status", "14"), ("grpc-message", "gone%3A no")), True, "UNAVAILABLE: gone: no"),
        (literal(("grpc-status", "77")), True, "code 77: "),
        (literal(("grpc-status", "8"), ("grpc-status-details-bin", "!")), True, "RESOURCE_EXHAUSTED: "),
    ],
)
def test_an_end_is_told_from_headers(block: bytes, last: bool, problem: str) -> None:
    assert problem_of_headers(block, last=last) == problem
