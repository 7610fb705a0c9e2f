"""Where a service runs: this machine as it is, or a part of it that a command leads into (a network namespace)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Host:
    """`address` is listened on. `prefix` stands before a command and becomes it (exec), so that the process id stays;
    its first word is an absolute path."""

    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()


LOCAL = Host()
