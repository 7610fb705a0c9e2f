"""Decodes request bodies within bounds, and only as far as the first error.

The parts of a JSON body are counted by its punctuation, before anything of it is built. The parser is
quick, but building a million small objects blocks the event loop. Brackets, commas and quotation marks
are counted at the speed of a few memory copies, a piece at a time. Invalid JSON may be counted wrongly;
the parser stops at its first error.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from ryzanstein.router.faces.http.serving.presence import ClientLeft
from ryzanstein.router.faces.openai.answers.failures import MALFORMED, TOO_LARGE, HttpFailure, HttpRefused
from ryzanstein.router.faces.openai.requests.schemas import Body

MAX_TEXTS = 32_768
"""Keys and values that are strings."""
MAX_LISTS = 32_768
"""Objects and arrays."""
MAX_VALUES = 131_072
"""Members of objects and arrays, including numbers such as token ids."""
_SMALL_BYTES = 65_536
"""A body up to this size is too small to do harm."""
_PIECE_BYTES = 262_144

# Fields of which a body may have many entries.
_FIELDS = (
    *("messages", "prompt", "input", "tokens", "stop", "stop_token_ids", "logit_bias", "tools", "functions", "metadata"),
    *("response_format", "structured_outputs", "guided_json", "guided_choice"),
)


def _all_but(kept: bytes) -> bytes:
    return bytes(byte for byte in range(256) if byte not in kept)


_NO_QUOTE = _all_but(b'"')
_NO_PUNCTUATION = _all_but(b",[{")


class Excess(NamedTuple):
    """A bound that a body breaks.

    `field` is the largest field of the part that was counted, or "body" if there is none that can
    be large.
    """

    field: str
    what: str
    bound: int


def excesses(body: bytes) -> Iterator[Excess | None]:
    """Yields None after each piece, or the first bound that the body breaks and then stops."""
    if len(body) <= _SMALL_BYTES:
        return
    outline, end = Outline(), 0
    while end < len(body):
        begin, end = end, _end_of_piece(body, end)
        broken = outline.add(body[begin:end])
        yield None if broken is None else Excess(_largest_field(body, end), *broken)
        if broken is not None:
            return


class Outline:
    """Counts the pieces of one body.

    A piece never ends between a backslash and what it escapes.
    """

    def __init__(self) -> None:
        self._quotes = self._lists = self._values = 0

    def add(self, piece: bytes) -> tuple[str, int] | None:
        """Counts a piece. Returns the bound that is broken now, if any."""
        bare = piece.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in piece else piece
        inside = self._quotes % 2
        self._quotes += len(bare.translate(None, _NO_QUOTE))
        if self._quotes > 2 * MAX_TEXTS:
            return "strings, including keys", MAX_TEXTS
        punctuation = b"".join(bare.split(b'"')[inside::2]).translate(None, _NO_PUNCTUATION)
        commas = len(punctuation) - len(punctuation.translate(None, b","))
        self._lists += len(punctuation) - commas
        self._values += commas
        if self._lists > MAX_LISTS:
            return "objects and arrays", MAX_LISTS
        if self._values >= MAX_VALUES:
            return "values", MAX_VALUES
        return None


def _end_of_piece(body: bytes, begin: int) -> int:
    end = begin + _PIECE_BYTES
    piece = body[begin:end]
    num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
    return end + num_backslashes % 2


def _largest_field(body: bytes, end: int) -> str:
    """Returns the field with the most bytes between its name and the next field's, before `end`."""
    begins = sorted((body.find(b'"%s"' % name.encode(), 0, end), name) for name in _FIELDS)
    found = [(at, name) for at, name in begins if at >= 0]
    ends = [*[at for at, _ in found][1:], end]
    return max(((stop - at, name) for (at, name), stop in zip(found, ends, strict=False)), default=(0, "body"))[1]


_Body = TypeVar("_Body", bound=Body)
_Converted = TypeVar("_Converted")

_JSON = re.compile(r"application/(?:[\w.+-]+\+)?json\s*(?:;|$)", re.IGNORECASE)
_NO_OBJECT = HttpFailure(400, "the body must be a JSON object, with Content-Type: application/json", None, "invalid_body")
# msgspec reports the error of one field and where it is. A longer message quotes the body: the name
# of an unknown field.
_PLACE = " - at `$"
_PLACE_OF_KEY = " - at `key` in `$"
_MAX_CHARS = 512
_QUICK_BYTES = 8192  # read at once
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_LENGTH = re.compile(r"Expected `\w+` of length <= (\d+)")


class BodyReader:
    """Reads the bodies of one face.

    Large bodies take turns, so that many at once hold the loop no longer than one.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def read(
        self, http: Request, decoder: msgspec.json.Decoder[_Body], convert: Callable[[_Body], _Converted]
    ) -> tuple[_Body, _Converted]:
        """Returns the body, and what `convert` makes of it.

        Raises HttpRefused with the field and the bound, or ClientLeft when the client disconnects
        before the body is complete.
        """
        if not _JSON.match(http.headers.get("content-type", "")):
            raise HttpRefused(_NO_OBJECT, MALFORMED)
        try:
            # Not `body()`, which keeps it for as long as the request is answered.
            raw = b"".join([part async for part in http.stream()])
        except ClientDisconnect:
            raise ClientLeft from None
        return await self.parse(raw, decoder, convert)

    async def parse(
        self, raw: bytes, decoder: msgspec.json.Decoder[_Body], convert: Callable[[_Body], _Converted]
    ) -> tuple[_Body, _Converted]:
        """Returns the decoded body, and what `convert` makes of it. Raises HttpRefused."""
        if len(raw) <= _QUICK_BYTES:
            body = decoded(raw, decoder)
            return body, convert(body)
        async with self._turn:
            return await _in_pieces(raw, decoder, convert)


async def _in_pieces(
    raw: bytes, decoder: msgspec.json.Decoder[_Body], convert: Callable[[_Body], _Converted]
) -> tuple[_Body, _Converted]:
    """Decodes a large body in steps, so that other tasks of the loop run in between."""
    for excess in excesses(raw):
        if excess is not None:
            raise HttpRefused(_excessive(excess), TOO_LARGE)
        await asyncio.sleep(0)
    body = decoded(raw, decoder)
    await asyncio.sleep(0)
    converted = convert(body)
    await asyncio.sleep(0)
    return body, converted


def decoded(raw: bytes, decoder: msgspec.json.Decoder[_Body]) -> _Body:
    """Returns the decoded body. Raises HttpRefused for the first error."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise HttpRefused(_mistake(str(error)), MALFORMED) from None
    except UnicodeDecodeError:
        raise HttpRefused(_not_json("it is not UTF-8"), MALFORMED) from None
    except RecursionError:
        raise HttpRefused(_not_json("nested too deeply"), MALFORMED) from None
    except (msgspec.DecodeError, ValueError) as error:
        raise HttpRefused(_not_json(str(error)), MALFORMED) from None


def _excessive(excess: Excess) -> HttpFailure:
    message = f"{excess.field}: a body may have at most {excess.bound} {excess.what}"
    return HttpFailure(400, message, excess.field, "invalid_argument")


def _not_json(why: str) -> HttpFailure:
    return HttpFailure(400, f"the body is not valid JSON: {why}"[:512], None, "invalid_json")


def _mistake(message: str) -> HttpFailure:
    message = message.replace(_PLACE_OF_KEY, _PLACE)
    text, _, path = message.partition(_PLACE) if len(message) <= _MAX_CHARS else (f"{message[:_MAX_CHARS]}`", "", "")
    # The message does not name a dictionary's key, only that it is one of them.
    path = path.removesuffix("`").replace("[...]", "").removeprefix(".")
    if (missing := _MISSING.fullmatch(text)) is not None:
        path, text = _joined(path, missing[1]), "is required"
    elif (unknown := _UNKNOWN.fullmatch(text)) is not None:
        path, text = _joined(path, unknown[1])[:128], "is not a field of this request"
    elif (length := _LENGTH.fullmatch(text)) is not None:
        text = f"must have at most {length[1]} entries"
    if not path:
        return _NO_OBJECT
    return HttpFailure(400, f"{path}: {text}"[:512], path, "invalid_argument")


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
