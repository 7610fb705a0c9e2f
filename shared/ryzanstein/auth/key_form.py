"""What an API key looks like: `rz_`, a public id, a secret, and a checksum, 64 characters in all.

The id has 12 characters of base62, the secret 43, which hold 256 random bits, and the checksum 6: the
CRC32 of all that is before it. So a scanner of leaked secrets knows a key without asking anybody, and
what is no key costs no look-up.
"""

from __future__ import annotations

import re
import secrets
import string
import zlib
from dataclasses import dataclass, field
from hashlib import sha256

PREFIX = "rz_"
ID_CHARS, SECRET_CHARS, CHECKSUM_CHARS = 12, 43, 6
KEY_CHARS = len(PREFIX) + ID_CHARS + SECRET_CHARS + CHECKSUM_CHARS
DIGEST_CHARS = 64
SECRET_BITS = 256
_DIGITS = string.digits + string.ascii_uppercase + string.ascii_lowercase
_ID_END = len(PREFIX) + ID_CHARS
_SECRET_END = _ID_END + SECRET_CHARS
_FORM = re.compile(rf"{PREFIX}[0-9A-Za-z]{{{KEY_CHARS - len(PREFIX)}}}")
_ID = re.compile(rf"[0-9A-Za-z]{{{ID_CHARS}}}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key. Only `key_id` may be shown."""

    key_id: str
    secret: str = field(repr=False)

    @classmethod
    def new(cls) -> ApiKey:
        """Returns a key that nobody has."""
        key_id = "".join(secrets.choice(_DIGITS) for _ in range(ID_CHARS))
        return cls(key_id, _base62(secrets.randbits(SECRET_BITS), SECRET_CHARS))

    @classmethod
    def parse(cls, text: str) -> ApiKey | None:
        """Returns the key of a text; None if it is none: it has another form, or the checksum is wrong."""
        if len(text) != KEY_CHARS or _FORM.fullmatch(text) is None or _checksum(text[:_SECRET_END]) != text[_SECRET_END:]:
            return None
        return cls(text[len(PREFIX) : _ID_END], text[_ID_END:_SECRET_END])

    def reveal(self) -> str:
        """Returns the text that a client sends."""
        text = PREFIX + self.key_id + self.secret
        return text + _checksum(text)

    def digest(self) -> str:
        """Returns what is kept of the secret. One SHA-256 is enough: nobody guesses 256 random bits."""
        return sha256(self.secret.encode()).hexdigest()


def has_key_form(text: str) -> bool:
    """Whether a text is meant as a key, whatever is wrong with it."""
    return text.startswith(PREFIX)


def is_key_id(text: object) -> bool:
    """Whether a value may be the public id of a key."""
    return isinstance(text, str) and _ID.fullmatch(text) is not None


def _checksum(text: str) -> str:
    return _base62(zlib.crc32(text.encode("ascii")), CHECKSUM_CHARS)


def _base62(number: int, length: int) -> str:
    digits = []
    for _ in range(length):
        number, digit = divmod(number, len(_DIGITS))
        digits.append(_DIGITS[digit])
    return "".join(reversed(digits))
