"""The settings of the services, from their pydantic classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

import annotated_types
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from ryzanstein.config import ProcessSettings, ServiceSettings, place_of
from ryzanstein.console.config import ConsoleSettings
from ryzanstein.lab.reference.markdown import GENERATED, table
from ryzanstein.orchestrator.config import OrchestratorSettings
from ryzanstein.router.config import RouterSettings
from ryzanstein.worker.config import WorkerSettings

_SERVICES: Mapping[str, type[ProcessSettings]] = MappingProxyType(
    {
        "All services": ProcessSettings,
        "Router, worker and orchestrator": ServiceSettings,
        "Router": RouterSettings,
        "Worker": WorkerSettings,
        "Orchestrator": OrchestratorSettings,
        "Console": ConsoleSettings,
    }
)
_INTRODUCTION = f"""# Settings

{GENERATED}

Each service reads its settings once, when it starts: `RYZANSTEIN_GRPC_PORT=50051` in the environment or `--grpc-port 50051` on
the command line. A flag counts before the environment. A wrong setting ends the process with exit code 2, and the message names
the setting and its bound. A setting that stands in the table of a service and in an earlier one has another default there.
[Configure](../operate/configure.md) says which settings matter first.
"""


_FORMER = """Settings of the release before. They are taken for one release, and a service that is given one logs a warning.
What begins with `tuning.` is a constant of the setting `tuning`: a JSON object such as `{"suspicion": {"stall_s": 3}}` for
tests and experiments, which is not part of the compatible interface."""


def settings_page() -> str:
    """Returns the page with a table for each service."""
    lines = [_INTRODUCTION]
    for title, settings in _SERVICES.items():
        rows = [_row(name, field) for name, field in settings.model_fields.items() if name in settings.__annotations__]
        lines += [f"## {title}", "", *table(("setting", "environment", "default", "values", "meaning"), rows)]
    lines += ["## Former names", "", _FORMER, "", *table(("former", "now", "service"), _former_names()), ""]
    return "\n".join(lines)


def _former_names() -> list[tuple[str, ...]]:
    return [
        (f"`{name}`", f"`{place_of(settings, name)}`", title.lower())
        for title, settings in _SERVICES.items()
        for name in settings.moved
    ]


def _row(name: str, field: FieldInfo) -> tuple[str, ...]:
    environment = f"`RYZANSTEIN_{name.upper()}`"
    return f"`{name}`", environment, _default(name, field), _values(name, field), field.description or ""


def _default(name: str, field: FieldInfo) -> str:
    value: Any = field.default
    if field.is_required() or field.default_factory is not None:
        return "must be set" if field.is_required() else "computed"
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value in ("", {}, SecretStr("")):
        return "unset" if value is None else "empty"
    if isinstance(value, int | float):
        return _number(name, value)
    return f"`{value}`" if isinstance(value, str | Path) else str(value)


def _number(name: str, value: float) -> str:
    if name.endswith("_port"):
        return str(value)
    if name.endswith("_bytes"):
        return _bytes(int(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}"


def _bytes(value: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value and value % size == 0:
            return f"{value // size:,} {unit}"
    return f"{value:,}"


def _values(name: str, field: FieldInfo) -> str:
    """Returns the choices or the bounds of a setting."""
    if get_origin(field.annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(field.annotation))
    return "on, off" if field.annotation is bool else " ".join(_bounds(name, field))


def _bounds(name: str, field: FieldInfo) -> Iterator[str]:
    for bound in field.metadata:
        match bound:
            case annotated_types.Ge(ge=int() | float() as least):
                yield f"from {_number(name, least)}"
            case annotated_types.Gt(gt=int() | float() as least):
                yield f"above {_number(name, least)}"
            case annotated_types.Le(le=int() | float() as most):
                yield f"to {_number(name, most)}"
            case annotated_types.Lt(lt=int() | float() as most):
                yield f"below {_number(name, most)}"
            case annotated_types.MaxLen(max_length=most):
                yield f"at most {most:,} characters"
