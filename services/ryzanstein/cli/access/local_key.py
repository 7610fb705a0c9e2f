"""The API key of a cluster on this machine: made once, and kept beside the cluster's state."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from ryzanstein.auth.caller import Scope
from ryzanstein.auth.key_form import ApiKey
from ryzanstein.auth.keys.keys_file import KeysFile
from ryzanstein.auth.keys.records import KeyRecord
from ryzanstein.errors import RyzansteinError
from ryzanstein.files.private_files import opener

TENANT = "local"
_SCOPES = frozenset(Scope) - {Scope.ACT_AS}


@dataclass(frozen=True, slots=True)
class LocalKey:
    """A key, the file that has it for clients, and the keys file of the routers."""

    path: Path
    keys_file: Path
    key: str = field(repr=False)

    @classmethod
    def kept(cls, directory: Path) -> LocalKey:
        """Returns the key of the directory; a new one if there is none, it was revoked, or an earlier version gave it less.

        Raises KeysFileError if the keys file cannot be used, OSError if nothing can be written.
        """
        path, keys_file = directory / "api-key", directory / "keys.toml"
        text = path.read_text().strip() if path.exists() else ""
        if not text or not _is_valid(keys_file, text):
            key = ApiKey.new()
            KeysFile(keys_file).add(KeyRecord(key.key_id, key.digest(), TENANT, _SCOPES, note="made by ryzanstein up"))
            text = key.reveal()
            with open(path, "w", opener=opener) as file:
                file.write(text + os.linesep)
        return cls(path, keys_file, text)


def _is_valid(keys_file: Path, text: str) -> bool:
    try:
        found = KeysFile(keys_file).read().find(text, time.time()) if keys_file.exists() else None
        return found is not None and found.scopes >= _SCOPES
    except RyzansteinError:
        return False
