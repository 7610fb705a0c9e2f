"""Which names a client may give in `Host`: a web page must not reach the API of the machine that shows it.

A page of `attacker.example` may have that name resolve to 127.0.0.1 (DNS rebinding): the browser then takes
the router for a part of the page. No such page can send a key, so names are checked only where none is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address

from ryzanstein.addresses import host_of
from ryzanstein.router.faces.openai.answers.failures import HOST, HttpFailure, HttpRefused

_LOCAL = ("localhost",)


class HostNames:
    """The names of a face, in lower case: the given ones, `localhost`, and every IP address. `any_name`: all names."""

    def __init__(self, names: Iterable[str] = (), *, any_name: bool = False) -> None:
        self._names = frozenset((*_LOCAL, *(name.lower() for name in names)))
        self._any = any_name

    def check(self, given: str) -> None:
        """Raises HttpRefused for a name that is not one of the face's. `given`: the Host; empty if there is none."""
        if self._any or not given:
            return
        host = host_of(given.lower())
        if host.removesuffix(".") in self._names or _is_address(host):
            return
        message = f"Host: {given[:128]!r} is no name of this router; add it to http_hosts"
        raise HttpRefused(HttpFailure(403, message, "Host", "host_not_allowed"), HOST)


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
