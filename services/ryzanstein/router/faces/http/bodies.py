"""Decodes request bodies within bounds, and only as far as the first error."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from ryzanstein.router.faces.http.outline import Excess, excesses
from ryzanstein.router.faces.http.serving.presence import ClientLeft
from ryzanstein.router.faces.openai.answers.failures import MALFORMED, TOO_LARGE, HttpFailure, HttpRefused
from ryzanstein.router.faces.openai.requests.schemas import Body

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
    said, _, path = message.partition(_PLACE) if len(message) <= _MAX_CHARS else (f"{message[:_MAX_CHARS]}`", "", "")
    # The message does not name a dictionary's key, only that it is one of them.
    path = path.removesuffix("`").replace("[...]", "").removeprefix(".")
    if (missing := _MISSING.fullmatch(said)) is not None:
        path, said = _joined(path, missing[1]), "is required"
    elif (unknown := _UNKNOWN.fullmatch(said)) is not None:
        path, said = _joined(path, unknown[1])[:128], "is not a field of this request"
    elif (length := _LENGTH.fullmatch(said)) is not None:
        said = f"must have at most {length[1]} entries"
    if not path:
        return _NO_OBJECT
    return HttpFailure(400, f"{path}: {said}"[:512], path, "invalid_argument")


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
