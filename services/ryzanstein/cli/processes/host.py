"""Where a service runs: this machine, or a part of it that a command enters.

For example a network namespace.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Host:
    """The address to listen on, and an optional command `prefix`.

    `prefix` precedes a command and becomes it (exec), so that the process id stays. Its first word
    is an absolute path.
    """

    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()


LOCAL = Host()
