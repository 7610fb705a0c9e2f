"""The id of a call in the logs of all services: the client's own, or a generated one."""

from __future__ import annotations

import re
import secrets

MAX_CHARS = 128
_VISIBLE = re.compile(rf"[\x21-\x7e]{{1,{MAX_CHARS}}}")


def request_id(given: str) -> str:
    """Returns the client's id if it is 1 to 128 visible ASCII characters, otherwise a new one."""
    return given if _VISIBLE.fullmatch(given) else secrets.token_hex(16)
