"""`ryzanstein keys`: `add`, `list`, `revoke`, `check` and `import`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ryzanstein.auth.caller import DEFAULT_SCOPES, Scope
from ryzanstein.auth.key_form import KEY_CHARS, ApiKey, is_key_id
from ryzanstein.auth.keys.key_fields import MAX_NOTE_CHARS, check_new, moment
from ryzanstein.auth.keys.keys_file import KeyExistsError, KeysFile, KeysFileError, NoSuchKeyError
from ryzanstein.auth.keys.records import KeyRecord, KeySnapshot
from ryzanstein.auth.tenants import rules_table
from ryzanstein.cli import display
from ryzanstein.cli.keys.audit_line import recorded
from ryzanstein.cli.keys.places import REDIS_VARIABLE, File, GivenPlace, PlaceError, RedisPrefix, RedisUrl, redis_keys
from ryzanstein.cli.keys.times import end_of
from ryzanstein.cli.options import text_value
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.request import MAX_PRIORITY

app = typer.Typer(no_args_is_help=True, help="Make, list, revoke and check API keys.")
_MOST_READ = 8 * KEY_CHARS


@app.command()
def add(
    tenant: Annotated[str, typer.Argument(callback=text_value, help="Who owns what is made with the key.")],
    *,
    scope: Annotated[
        list[Scope] | None,
        typer.Option(show_default=" ".join(sorted(DEFAULT_SCOPES)), help="What the key may be used for; repeated."),
    ] = None,
    model: Annotated[list[str] | None, typer.Option(show_default="all", help="Model that it may use; repeated.")] = None,
    expires: Annotated[
        str | None,
        typer.Option(show_default="never", help="When it ends: 90d, 12h, 2030-01-31 or 2030-01-31T12:00:00Z."),
    ] = None,
    max_priority: Annotated[
        int, typer.Option(min=-MAX_PRIORITY, max=MAX_PRIORITY, help="Highest priority of its requests.")
    ] = MAX_PRIORITY,
    note: Annotated[str, typer.Option(callback=text_value, help=f"What it is for, at most {MAX_NOTE_CHARS} characters.")] = "",
    file: File = None,
    redis_url: RedisUrl = None,
    redis_prefix: RedisPrefix = "ryzanstein:",
) -> None:
    """Make a key and print it, alone on standard output. It is shown once: only its digest is kept.

    Exit code 1: the keys cannot be read or written.
    """
    now, key = time.time(), ApiKey.new()
    record = KeyRecord(
        key.key_id,
        key.digest(),
        tenant,
        frozenset(scope) if scope else DEFAULT_SCOPES,
        frozenset(model) if model else None,
        max_priority,
        float(int(now)),
        end_of(expires, now),
        note,
    )
    try:
        check_new(record)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with _failures(), GivenPlace(file, redis_url, redis_prefix).opened() as keys, recorded("keys add", key.key_id):
        keys.add(record)
    print(key.reveal(), flush=True)
    _say(f"key {key.key_id} of {tenant}: {_scopes(record)}; {_until(record)}. It is not shown again.")


@app.command("list")
def list_keys(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    file: File = None,
    redis_url: RedisUrl = None,
    redis_prefix: RedisPrefix = "ryzanstein:",
) -> None:
    """List the keys, with neither secrets nor digests. Exit code 1: they cannot be read."""
    with _failures(), GivenPlace(file, redis_url, redis_prefix).opened() as keys:
        snapshot = keys.read()
    now = time.time()
    if as_json:
        tenants = [{"tenant": name, **rules_table(rules)} for name, rules in snapshot.tenants.items()]
        rows = [_entry(record, snapshot, now) for record in snapshot.keys.values()]
        display.print_json({"keys": rows, "tenants": tenants})
        return
    table = Table("id", "tenant", "state", "scopes", "models", "created", "expires", "note", box=None, pad_edge=False)
    for record in snapshot.keys.values():
        entry = _entry(record, snapshot, now)
        models = "all" if record.models is None else " ".join(sorted(record.models))
        cells = (record.key_id, record.tenant, entry["state"], _scopes(record), models)
        table.add_row(*map(str, cells), str(entry["created"])[:10], str(entry["expires"] or "never")[:10], record.note)
    display.output().print(table, markup=False)


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", callback=text_value, help="The key's id, from `keys list`.")],
    *,
    file: File = None,
    redis_url: RedisUrl = None,
    redis_prefix: RedisPrefix = "ryzanstein:",
) -> None:
    """Revoke a key, for ever. Routers refuse it within two seconds, and end what runs with it.

    Exit code 1: there is no such key, or the keys cannot be written.
    """
    if not is_key_id(key_id):
        # A whole key that was given by mistake is not repeated.
        raise typer.BadParameter("must be the id of a key: 12 letters and digits", param_hint="'ID'")
    with _failures(), GivenPlace(file, redis_url, redis_prefix).opened() as keys, recorded("keys revoke", key_id):
        revoked = keys.revoke(key_id, time.time())
    _say(f"key {key_id} is revoked" if revoked else f"key {key_id} was revoked already")


@app.command()
def check(
    *,
    file: File = None,
    redis_url: RedisUrl = None,
    redis_prefix: RedisPrefix = "ryzanstein:",
) -> None:
    """Read a key from standard input, and print what it may do.

    Exit code 1: it is no key, is unknown, revoked or has expired, or the keys cannot be read.
    """
    text = sys.stdin.read(_MOST_READ).strip()
    with _failures(), GivenPlace(file, redis_url, redis_prefix).opened() as keys:
        snapshot = keys.read()
        record = snapshot.find(text, time.time())
        caller = snapshot.caller_of(record)
    display.print_json(
        {
            **_entry(record, snapshot, time.time()),
            "max_priority": caller.max_priority,
            "cache_scope": caller.cache_scope,
            "limits": rules_table(snapshot.rules_of(record.tenant)),
        }
    )


@app.command("import")
def import_keys(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="A keys file.")],
    *,
    redis_url: Annotated[
        str,
        typer.Option(envvar=REDIS_VARIABLE, help="Redis server; other users can read a password in the command line."),
    ],
    redis_prefix: RedisPrefix = "ryzanstein:",
) -> None:
    """Write a keys file to Redis: its keys are added to those there, its tenants replace those there.

    Exit code 1: the file cannot be read, or Redis cannot be written.
    """
    with _failures():
        snapshot = KeysFile(source).read()
        with redis_keys(redis_url, redis_prefix) as keys, recorded("keys import", str(source)):
            keys.take(snapshot)
    _say(
        f"{len(snapshot.keys)} keys, {len(snapshot.revoked)} of them revoked, and {len(snapshot.tenants)} tenants are in Redis"
    )


def _entry(record: KeyRecord, snapshot: KeySnapshot, now: float) -> dict[str, object]:
    ended = snapshot.ended(record, now)
    return {
        "id": record.key_id,
        "tenant": record.tenant,
        "state": "valid" if ended is None else ended.reason.removeprefix("KEY_").lower(),
        "scopes": sorted(record.scopes),
        "models": None if record.models is None else sorted(record.models),
        "max_priority": record.max_priority,
        "created": moment(record.created).isoformat(),
        "expires": None if record.expires is None else moment(record.expires).isoformat(),
        "note": record.note,
    }


def _scopes(record: KeyRecord) -> str:
    return " ".join(sorted(record.scopes))


def _until(record: KeyRecord) -> str:
    return "never expires" if record.expires is None else f"expires {moment(record.expires).isoformat()}"


def _say(message: str, style: str | None = None) -> None:
    display.people().print(message, style=style, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _failures() -> Iterator[None]:
    """Ends the command with one sentence and exit code 1."""
    try:
        yield
        return
    except (KeysFileError, PlaceError, RyzansteinError) as error:
        message = str(error)
    except NoSuchKeyError as error:
        message = f"there is no key {error}"
    except KeyExistsError as error:
        message = f"there is a key {error} already: try again"
    _say(message, style="red")
    raise typer.Exit(1) from None
