"""The id by which one call is found in the logs of all services: the client's own, or one made here."""

from __future__ import annotations

import re
import uuid

MAX_CHARS = 128
_VISIBLE = re.compile(rf"[\x21-\x7e]{{1,{MAX_CHARS}}}")


def request_id(given: str) -> str:
    """What the client sent, if that is 1 to 128 visible ASCII characters; otherwise a new one."""
    return given if _VISIBLE.fullmatch(given) else uuid.uuid4().hex
