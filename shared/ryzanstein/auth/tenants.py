"""What a tenant may use: the table `[tenant.NAME]` of a keys file, as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ryzanstein.bounds import LARGEST
from ryzanstein.generation.prompts import MAX_NAME_CHARS, VISIBLE
from ryzanstein.generation.request import MAX_PRIORITY

EVERY_OTHER = "*"
"""The table of tenants that have none of their own."""
MOST_PER_SECOND = 1_000_000
_GROUP, _OWN = "group:", "tenant:"


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """The limits of one tenant. None: there is no limit of this kind.

    `requests_per_second` is the mean rate, of which `burst` requests may come at once; None: those of
    one second. `tokens_per_minute` and `tokens_per_month` count prompts and answers. `concurrent` bounds
    running generations. With `hard_month` an answer ends where the month's tokens do; without it, what
    has begun goes on. `max_tokens` bounds one answer, `sessions` the conversations that are kept.
    """

    requests_per_second: float | None = None
    burst: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    tokens_per_month: int | None = None
    hard_month: bool = False
    max_tokens: int | None = None
    sessions: int | None = None


NO_LIMITS = TenantLimits()


@dataclass(frozen=True, slots=True)
class TenantRules:
    """What a keys file says of a tenant. `max_priority` bounds the priority of its requests.

    Tenants of one `cache_group` share prefixes in the KV cache; empty: this tenant shares them with nobody.
    """

    limits: TenantLimits = NO_LIMITS
    cache_group: str = ""
    max_priority: int = MAX_PRIORITY

    def cache_scope(self, tenant: str) -> str:
        """Returns the cache scope of this tenant's requests. No name of a tenant gives the scope of another or of a group."""
        if self.cache_group:
            return f"{_GROUP}{self.cache_group}"
        return f"{_OWN}{tenant}" if tenant.startswith((_GROUP, _OWN)) else tenant


DEFAULT_RULES = TenantRules()


def tenant_fault(name: object) -> str:
    """Returns what is wrong with a tenant's name, as the end of a sentence; empty: nothing."""
    fits = isinstance(name, str) and len(name) <= MAX_NAME_CHARS and VISIBLE.fullmatch(name)
    return "" if fits else f"must have 1 to {MAX_NAME_CHARS} visible ASCII characters"


def read_rules(table: Mapping[str, object]) -> TenantRules:
    """Returns the rules of a table. Raises ValueError, which names the field."""
    if unknown := sorted(set(table) - set(_FIELDS)):
        raise ValueError(f"no such field: {unknown[0][:64]!r}; fields are {', '.join(_FIELDS)}")
    for name, value in table.items():
        if fault := _FIELDS[name](value):
            raise ValueError(f"{name}: {fault}")
    given = {name: value for name, value in table.items() if name not in ("hard", "cache", "priority")}
    if "burst" in table and "requests_per_second" not in table:
        raise ValueError("burst: needs requests_per_second")
    if table.get("hard") and "tokens_per_month" not in table:
        raise ValueError("hard: needs tokens_per_month")
    limits = TenantLimits(**given, hard_month=bool(table.get("hard", False)))  # type: ignore[arg-type] # _FIELDS checked them
    cache, priority = table.get("cache", "tenant"), table.get("priority", MAX_PRIORITY)
    group = str(cache).removeprefix(_GROUP) if str(cache).startswith(_GROUP) else ""
    return TenantRules(limits, group, priority if isinstance(priority, int) else MAX_PRIORITY)


def rules_table(rules: TenantRules) -> dict[str, object]:
    """Returns the table that `read_rules` reads these rules from."""
    limits = rules.limits
    table: dict[str, object] = {name: getattr(limits, name) for name in _LIMITS if getattr(limits, name) is not None}
    if limits.hard_month:
        table["hard"] = True
    if rules.cache_group:
        table["cache"] = f"{_GROUP}{rules.cache_group}"
    if rules.max_priority != MAX_PRIORITY:
        table["priority"] = rules.max_priority
    return table


def _whole(least: int, most: int) -> Callable[[object], str]:
    def fault(value: object) -> str:
        fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        return "" if fits else f"must be a whole number in [{least}, {most}]"

    return fault


def _rate(value: object) -> str:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MOST_PER_SECOND
    return "" if fits else f"must be a number above 0 and at most {MOST_PER_SECOND}"


def _switch(value: object) -> str:
    return "" if isinstance(value, bool) else "must be true or false"


def _cache(value: object) -> str:
    group = value.removeprefix(_GROUP) if isinstance(value, str) and value.startswith(_GROUP) else None
    fits = value == "tenant" or (group is not None and not tenant_fault(group))
    return "" if fits else 'must be "tenant" or "group:NAME"'


_LIMITS: Mapping[str, Callable[[object], str]] = MappingProxyType(
    {
        "requests_per_second": _rate,
        "burst": _whole(1, MOST_PER_SECOND),
        "tokens_per_minute": _whole(1, LARGEST),
        "concurrent": _whole(1, LARGEST),
        "tokens_per_month": _whole(1, LARGEST),
        "max_tokens": _whole(1, LARGEST),
        "sessions": _whole(1, LARGEST),
    }
)
_FIELDS: Mapping[str, Callable[[object], str]] = MappingProxyType(
    {**_LIMITS, "hard": _switch, "cache": _cache, "priority": _whole(-MAX_PRIORITY, MAX_PRIORITY)}
)
