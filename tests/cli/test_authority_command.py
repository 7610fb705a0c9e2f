"""`ryzanstein ca`: files that services accept, with safe modes, and sentences for what is wrong."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ryzanstein.auth.peers.material import read_material
from ryzanstein.auth.peers.peer import DEFAULT_TRUST, Peer, PeerRole
from ryzanstein.cli.main import build


def ca(*arguments: str) -> Result:
    return CliRunner().invoke(build(), ["ca", *arguments])


@pytest.fixture
def directory(tmp_path: Path) -> str:
    assert ca("init", str(tmp_path / "ca")).exit_code == 0
    return str(tmp_path / "ca")


@pytest.mark.parametrize(
    ("option", "peer"),
    [
        (("--node", "n-1"), Peer(PeerRole.NODE, "n-1")),
        (("--node", "../../x"), Peer(PeerRole.NODE, "../../x")),
        (("--router", "R" * 128), Peer(PeerRole.ROUTER, "R" * 128)),
        (("--orchestrator",), Peer(PeerRole.ORCHESTRATOR)),
        (("--operator", "Ada L."), Peer(PeerRole.OPERATOR, "Ada L.")),
        (("--monitor", "prometheus"), Peer(PeerRole.MONITOR, "prometheus")),
    ],
)
def test_each_role_gets_a_certificate_that_services_accept(directory: str, option: tuple[str, ...], peer: Peer) -> None:
    assert ca("issue", directory, *option).exit_code == 0
    (found,) = {path.parent for path in Path(directory).glob("*/tls.crt")}
    first = read_material(found, DEFAULT_TRUST, time.time())
    assert first.peer == peer
    assert ca("renew", directory).exit_code == 0
    again = read_material(found, DEFAULT_TRUST, time.time())
    assert again.peer == peer
    assert again.serial != first.serial


def test_private_files_are_private(directory: str, tmp_path: Path) -> None:
    assert ca("issue", directory, "--node", "n", "--out", str(tmp_path / "out")).exit_code == 0
    assert [path.stat().st_mode & 0o777 for path in (Path(directory), Path(directory, "ca.key"))] == [0o700, 0o600]
    assert (tmp_path / "out" / "tls.key").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "out" / "ca.key").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["init", "{ca}"], 1, "never overwritten"),
        (["init", "{new}", "--trust-domain", "Not A Domain"], 2, "DNS name"),
        (["issue", "{new}", "--node", "n"], 1, "ryzanstein ca init"),
        (["issue", "{ca}"], 2, "give one of"),
        (["issue", "{ca}", "--node", "a", "--router", "b"], 2, "give one of"),
        (["issue", "{ca}", "--node", "n" * 129], 2, "128"),
        (["renew", "{ca}"], 1, "no certificate"),
        (["renew", "{ca}", "--out", "{new}"], 1, "No such file"),
    ],
)
def test_what_is_wrong_is_said(directory: str, tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    result = ca(*(each.format(ca=directory, new=tmp_path / "new") for each in arguments))
    assert result.exit_code == code
    assert said in " ".join(result.output.replace("│", " ").split())


def test_a_certificate_is_issued_once(directory: str) -> None:
    assert ca("issue", directory, "--node", "n").exit_code == 0
    again = ca("issue", directory, "--node", "n")
    assert again.exit_code == 1
    assert "renew" in again.output
