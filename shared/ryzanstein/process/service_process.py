"""The process of a service: settings, logs, event loop and exit code, the same for all three."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog
import uvloop
from pydantic import ValidationError
from pydantic_settings import CliApp, SettingsError

from ryzanstein.config import ProcessSettings, in_tuning, moved_flags, moved_variables, place_of
from ryzanstein.observe import log as logs
from ryzanstein.observe.log_files import Rotation
from ryzanstein.process.spare_memory import limit_arenas
from ryzanstein.process.timeslice import ask_for_short_slices

log = structlog.get_logger(__name__)

STOPPED, FAILED, BAD_SETTINGS = 0, 1, 2

_Settings = TypeVar("_Settings", bound=ProcessSettings)


class BadSettingsError(Exception):
    """What a setting names cannot be used: the process ends as with a setting that is invalid."""


def read_settings(kind: type[_Settings]) -> _Settings:
    """Reads settings from flags and the environment. Prints what is invalid, and exits with BAD_SETTINGS then."""
    arguments, moved = moved_flags(kind, sys.argv[1:])
    try:
        settings = CliApp.run(kind, arguments, **in_tuning(kind, moved.items()))
        settings.check_exposure()
        return settings
    except ValidationError as error:
        for problem in error.errors():
            print(f"{'.'.join(map(str, problem['loc'])) or 'settings'}: {problem['msg']}", file=sys.stderr)
    except SettingsError as error:
        print(f"settings: {error}: {error.__cause__}", file=sys.stderr)
    except ValueError as error:
        print(f"host: {error}", file=sys.stderr)
    sys.exit(BAD_SETTINGS)


def run_service(
    service: str,
    settings: _Settings,
    serve: Callable[[_Settings], Coroutine[Any, Any, None]],
    refusals: tuple[type[Exception], ...],
    **bound: str,
) -> int:
    """Runs `serve` until it ends and returns the exit code of the process.

    `refusals` are the errors that mean that the service cannot serve: their text is logged, without a stack.
    `bound` are fields of every log line.
    """
    limit_arenas()
    rotation = Rotation(settings.log_file_bytes, settings.log_files)
    logs.setup_service(service, settings.log_level, rotation, **bound)
    _warn_of_moved(type(settings))
    ask_for_short_slices()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            uvloop.run(serve(settings))
    except BadSettingsError as error:
        log.error("bad settings", error=str(error))
        return BAD_SETTINGS
    except refusals as error:
        log.error("cannot serve", error=str(error))
        return FAILED
    except Exception:
        log.exception("failed")
        return FAILED
    return STOPPED


def _warn_of_moved(kind: type[ProcessSettings]) -> None:
    """Logs a warning for each setting that was given under its name of an earlier release."""
    for name in moved_variables(kind) | moved_flags(kind, sys.argv[1:])[1]:
        log.warning("old name of a setting, refused from the next release on", setting=name, use=place_of(kind, name))
