"""docs/reference/access.md: which scope a caller needs, from the tables that routers ask."""

from __future__ import annotations

from ryzanstein.auth.rules import PUBLIC_METHODS, PUBLIC_ROUTES, Need
from ryzanstein.lab.reference.markdown import GENERATED, table

_HEAD = f"""# Who may call what

{GENERATED}

What a router with [keys](../operate/access.md) asks of callers. What is in neither table needs a valid key and is then not
found, or is refused with `NOT_ALLOWED`. HEAD needs what GET needs. *anybody*: even without a key; *any key*: without a scope.
"""


def access_page() -> str:
    """Returns the page."""
    methods = [(f"`{name.removeprefix('/')}`", _asked(need)) for name, need in PUBLIC_METHODS.items()]
    routes = [(f"`{verb} {path.replace(':path', '')}`", _asked(need)) for (verb, path), need in PUBLIC_ROUTES.items()]
    lines = [
        "## gRPC",
        "",
        *table(("method", "needs"), methods),
        "## HTTP and WebSocket",
        "",
        *table(("route", "needs"), routes),
    ]
    return "\n".join([_HEAD, *lines])


def _asked(need: Need) -> str:
    if need.is_open:
        return "*anybody*"
    return "*any key*" if need.scope is None else f"`{need.scope}`"
