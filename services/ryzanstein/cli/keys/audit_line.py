"""The record of who changed keys: one line of JSON on standard error. Redirect it to keep it."""

from __future__ import annotations

import json
import os
import pwd
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from ryzanstein.auth.audit.audit_record import DONE, FAILED


@contextmanager
def recorded(act: str, target: str) -> Iterator[None]:
    """Runs an act and writes its record, with the user of this process. `target` is the id of a key, or a file."""
    outcome = FAILED
    try:
        yield
        outcome = DONE
    finally:
        uid, now = os.getuid(), datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"audit": True, "time": now, "uid": uid, "user": _user(uid), "method": act, "target": target, "outcome": outcome}
        print(json.dumps(line), file=sys.stderr, flush=True)


def _user(uid: int) -> str:
    """Returns the user's name; empty in a container that has no entry for it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""
