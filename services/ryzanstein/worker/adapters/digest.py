"""What tells an adapter from others: a digest of its content."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ryzanstein.worker.adapters.reading import CONFIG, TENSORS
from ryzanstein.worker.adapters.unfit import AdapterUnfit
from ryzanstein.worker.json_files import UnreadableFile, open_regular

_WINDOW_BYTES = 2**20


def digest_of(path: Path) -> str:
    """Returns the SHA-256 of an adapter's files in hexadecimal digits: of what they contain, not of their place or age.

    Raises AdapterUnfit if a file cannot be read.
    """
    whole = hashlib.sha256()
    for part in [path] if path.is_file() else [path / CONFIG, path / TENSORS]:
        own, name = hashlib.sha256(), part.name
        try:
            with open_regular(part) as file:
                while window := file.read(_WINDOW_BYTES):
                    own.update(window)
        except UnreadableFile as error:
            raise AdapterUnfit(name, str(error)) from error
        except OSError as error:
            raise AdapterUnfit(name, error.strerror or "cannot be read") from error
        whole.update(own.digest())
    return whole.hexdigest()
