"""Bounds on the names in requests, and the name of the tenant."""

from __future__ import annotations

import re
from hashlib import blake2b

from ryzanstein import errors

MAX_NAME_CHARS = 128
MAX_LABEL_BYTES = 16_384
"""Of a label that others chose and that means nothing here: the id of a call, the name of an author."""
VISIBLE = re.compile(r"[\x21-\x7e]+")
"""Visible ASCII characters."""
TENANT_ID = "x-tenant-id"
"""The HTTP header and the gRPC metadata key that name the tenant."""


def name_fault(name: str) -> str:
    """Returns what is wrong with a name of a model, as the end of a sentence; empty: nothing."""
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        return f"must have 1 to {MAX_NAME_CHARS} characters, got {len(name)}"
    return "" if name.isprintable() else "has characters that cannot be printed"


def check_label(label: str, field: str) -> None:
    """Raises INVALID_ARGUMENT for a label that is too long."""
    if len(label) > MAX_LABEL_BYTES or (not label.isascii() and len(label.encode(errors="replace")) > MAX_LABEL_BYTES):
        raise errors.invalid(field, f"must have at most {MAX_LABEL_BYTES} bytes", label[:64])


def user_key(label: str, field: str) -> str:
    """Returns the key of a user: the label that the client gave, or a digest of one that is too long to be a key.

    Raises INVALID_ARGUMENT for a label that is longer than a label may be.
    """
    check_label(label, field)
    if len(label) <= MAX_NAME_CHARS:
        return label
    return f"blake2b:{blake2b(label.encode(errors='replace'), digest_size=16).hexdigest()}"


def valid_tenant(given: str, user: str) -> str:
    """Returns who is charged: the tenant that the caller's gateway names, else the user.

    Raises INVALID_ARGUMENT for a tenant name of over 128 characters or with other characters than
    visible ASCII.
    """
    if not given:
        return user
    if len(given) > MAX_NAME_CHARS or not VISIBLE.fullmatch(given):
        raise errors.invalid(TENANT_ID, f"must have 1 to {MAX_NAME_CHARS} visible ASCII characters", given[:64])
    return given
