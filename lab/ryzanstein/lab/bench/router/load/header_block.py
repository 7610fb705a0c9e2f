"""Reads an HTTP/2 header block (RFC 7541) of a peer that was allowed no dynamic table.

Such a block says the same wherever it stands. Of the static table only the names that tell how a call ended are
known here; other fields that it names are left out.
"""

from __future__ import annotations

from collections.abc import Iterator

_STATUS = ":status"
_STATUS_VALUES = {8: "200", 9: "204", 10: "206", 11: "304", 12: "400", 13: "404", 14: "500"}
_INDEXED, _INCREMENTAL, _SIZE_UPDATE = 0x80, 0x40, 0x20
_HUFFMAN = 0x80
# The bits of the Huffman code of each byte, and of the end of a string.
_CODE_BITS = bytes.fromhex(
    "0d171c1c1c1c1c1c1c181e1c1c1e1c1c1c1c1c1c1c1c1e1c1c1c1c1c1c1c1c1c060a0a0c0d06080b0a0a080b0806060605050506"
    "06060606060607080f060c0a0d06070707070707070707070707070707070707070707070807080d130d0e060f05060506050606"
    "060507070606060506070605050607070707070f0b0e0d1c14161414161616171617171717171817181816171817171717151617"
    "1617171816151416161717151716161815161717151516151716171714161616171616171a1a1413161716191a1a1a1b1b1a1819"
    "13151a1b1b1a1b1815151a1a1c1b1b1b14181415161515171616191918181a171a1b1a1a1b1b1b1b1b1c1b1b1b1b1b1a1e"
)


def _codes() -> dict[tuple[int, int], int]:
    """Returns the byte of each (bits, code): among those of equal length the codes count upwards with the bytes."""
    codes, code, before = {}, 0, 0
    for byte in sorted(range(len(_CODE_BITS)), key=lambda byte: (_CODE_BITS[byte], byte)):
        code <<= _CODE_BITS[byte] - before
        before = _CODE_BITS[byte]
        codes[before, code] = byte
        code += 1
    return codes


_CODES = _codes()


def header_fields(block: bytes) -> dict[str, str]:
    """Returns the fields by name. Raises ValueError or IndexError if the block is broken."""
    return dict(_fields(block))


def _fields(block: bytes) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(block):
        first = block[at]
        if first & _INDEXED:
            index, at = _integer(block, at, 7)
            if index in _STATUS_VALUES:
                yield _STATUS, _STATUS_VALUES[index]
        elif first & (_INCREMENTAL | _SIZE_UPDATE) == _SIZE_UPDATE:
            _, at = _integer(block, at, 5)
        else:
            index, at = _integer(block, at, 6 if first & _INCREMENTAL else 4)
            name, at = _string(block, at) if index == 0 else (_STATUS if index in _STATUS_VALUES else "", at)
            value, at = _string(block, at)
            if name:
                yield name, value


def _integer(block: bytes, at: int, prefix_bits: int) -> tuple[int, int]:
    """Returns an integer and where it ends (RFC 7541, 5.1)."""
    most = (1 << prefix_bits) - 1
    value, at, shift = block[at] & most, at + 1, 0
    if value < most:
        return value, at
    while True:
        value, at, more = value + ((block[at] & 0x7F) << shift), at + 1, block[at] & 0x80
        if not more:
            return value, at
        shift += 7


def _string(block: bytes, at: int) -> tuple[str, int]:
    huffman = block[at] & _HUFFMAN
    length, at = _integer(block, at, 7)
    text, end = block[at : at + length], at + length
    if end > len(block):
        raise ValueError("a string ends beyond its block")
    return (_expanded(text) if huffman else text).decode("latin-1"), end


def _expanded(text: bytes) -> bytes:
    """Returns what a Huffman code stands for. The bits that fill its last byte are no code."""
    found, code, bits = bytearray(), 0, 0
    for byte in text:
        for shift in range(7, -1, -1):
            code, bits = code << 1 | byte >> shift & 1, bits + 1
            if (value := _CODES.get((bits, code))) is not None:
                found.append(value)
                code = bits = 0
    return bytes(found)
