"""`ryzanstein ca`: `init`, `issue` and `renew`. The certificates of services and operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ryzanstein.auth.peers.peer import DEFAULT_TRUST, Peer, PeerRole, checked_peer, checked_trust
from ryzanstein.cli import display
from ryzanstein.cli.options import text_value
from ryzanstein.cli.programs import require

if TYPE_CHECKING:
    from ryzanstein.auth.peers.authority import Authority

app = typer.Typer(no_args_is_help=True, help="Make a CA, and certificates for services and operators.")

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the CA.")]


@app.command()
def init(
    directory: Directory,
    *,
    trust_domain: Annotated[str, typer.Option(callback=text_value, help="The domain in all its certificates.")] = DEFAULT_TRUST,
) -> None:
    """Make a CA of 10 years. Its `ca.key` lets anybody join the cluster: keep it where no service runs."""
    try:
        checked_trust(trust_domain)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--trust-domain") from None
    with _certificates():
        from ryzanstein.auth.peers.authority import Authority

        Authority.new(trust_domain).save(directory)
    _say(f"{directory} has a CA for {trust_domain}")


@app.command()
def issue(
    directory: Directory,
    *,
    node: Annotated[str | None, typer.Option(callback=text_value, metavar="ID", help="For the node of this id.")] = None,
    router: Annotated[str | None, typer.Option(callback=text_value, metavar="ID", help="For the router of this id.")] = None,
    orchestrator: Annotated[bool, typer.Option("--orchestrator", help="For the orchestrator.")] = False,
    operator: Annotated[
        str | None, typer.Option(callback=text_value, metavar="NAME", help="For somebody who deploys and drains.")
    ] = None,
    monitor: Annotated[str | None, typer.Option(callback=text_value, metavar="NAME", help="For what only looks.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write it; by default a folder of its name in DIR.")] = None,
) -> None:
    """Issue a certificate of 30 days: the directory is a service's --tls-dir."""
    given = {PeerRole.NODE: node, PeerRole.ROUTER: router, PeerRole.OPERATOR: operator, PeerRole.MONITOR: monitor}
    wanted = [(role, name) for role, name in given.items() if name is not None]
    if len(wanted) + orchestrator != 1:
        raise typer.BadParameter("give one of --node, --router, --orchestrator, --operator, --monitor")
    peer = _peer(*wanted[0]) if wanted else Peer(PeerRole.ORCHESTRATOR)
    with _certificates():
        authority = _authority(directory)
        target = out or directory / _folder(peer)
        ends = authority.write(peer, target)
    _say_issued(target, peer, ends)


@app.command()
def renew(
    directory: Directory,
    *,
    out: Annotated[
        list[Path] | None, typer.Option(help="Directory of a certificate, repeatable; by default all that are in DIR.")
    ] = None,
) -> None:
    """Replace certificates, with their keys, by new ones of the same names. Services take them within seconds."""
    with _certificates():
        authority = _authority(directory)
        targets = out or sorted(path.parent for path in directory.glob("*/tls.crt"))
        if not targets:
            display.people().print(f"no certificate is in {directory}; name its directory with --out", markup=False)
            raise typer.Exit(1)
        for target in targets:
            peer = authority.peer_in(target)
            _say_issued(target, peer, authority.write(peer, target, renew=True))


def _authority(directory: Path) -> Authority:
    from ryzanstein.auth.peers.authority import Authority

    return Authority.open(directory)


def _peer(role: PeerRole, name: str) -> Peer:
    try:
        return checked_peer(role, name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=f"--{role}") from None


def _folder(peer: Peer) -> str:
    """Returns the name of a certificate's folder: the DNS label of an id, which any id has."""
    return ".".join(peer.server_name("").split(".")[:2]) if peer.name else peer.role.value


@contextmanager
def _certificates() -> Iterator[None]:
    """Ends the command with a sentence where `cryptography` is missing or the CA refuses."""
    require("ca", "tls")
    from ryzanstein.auth.peers.authority import AuthorityError

    try:
        yield
    except AuthorityError as error:
        display.people().print(str(error), markup=False, soft_wrap=True)
        raise typer.Exit(1) from None


def _say_issued(target: Path, peer: Peer, ends: datetime) -> None:
    _say(f"{target} has the certificate of {peer}, until {ends:%Y-%m-%d}")


def _say(text: str) -> None:
    display.people().print(text, markup=False, soft_wrap=True)
