"""A router follows its keys file: what a command appends, a Secret that Kubernetes swaps, and files that are bad or gone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from ryzanstein.auth.caller import DEFAULT_SCOPES
from ryzanstein.auth.credential import Credential
from ryzanstein.auth.key_form import ApiKey
from ryzanstein.auth.keys.keys_file import KeysFile
from ryzanstein.auth.keys.keys_text import key_text
from ryzanstein.auth.keys.records import KeyRecord
from ryzanstein.process.service_process import BadSettingsError
from ryzanstein.router.access.stores import file as module
from ryzanstein.router.access.stores import watch
from ryzanstein.router.access.stores.file import FileKeys
from ryzanstein.router.access.stores.source import KeysUnreadableError
from ryzanstein.router.config import RouterSettings

FIRST, SECOND = ApiKey.new(), ApiKey.new()
Open = Callable[..., Awaitable[Any]]
Until = Callable[..., Awaitable[None]]


def text(key: ApiKey, **more: Any) -> str:
    return key_text(KeyRecord(key.key_id, key.digest(), "acme", DEFAULT_SCOPES, **more))


def write(path: Path, content: str) -> None:
    path.unlink(missing_ok=True)
    path.touch(0o600)
    path.write_text(content)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "keys.toml"
    made.touch(0o600)
    made.write_text(text(FIRST))
    return made


async def test_a_reload_says_in_the_audit_which_keys_it_changes(open_access: Open, path: Path, until: Until) -> None:
    with capture_logs() as lines:
        access = await open_access(keys_file=path)
        write(path, text(FIRST) + text(SECOND))
        await until(lambda: access.outcome(SECOND.reveal()) == "key", 2.0)
        write(path, text(SECOND))
        await until(lambda: access.outcome(FIRST.reveal()) != "key", 2.0)
    changes = [each for each in lines if each.get("audit")]
    assert [(each["added"], each["revoked"], each["removed"]) for each in changes] == [
        ([SECOND.key_id], [], []),
        ([], [], [FIRST.key_id]),
    ]
    assert FIRST.reveal() not in str(lines)


async def test_a_key_that_a_command_adds_is_known_and_one_that_it_revokes_is_refused(
    open_access: Open, path: Path, command: Callable[..., str], until: Until
) -> None:
    access = await open_access(keys_file=path)
    made = command("add", "globex", "--file", path, "--scope", "infer", "--model", "demo").strip()
    await until(lambda: access.outcome(made) == "key", 2.0)
    caller = access.caller(made)
    assert (caller.tenant, caller.models) == ("globex", frozenset({"demo"}))
    assert access.ended(caller) == ""
    command("revoke", caller.key_id, "--file", path)
    await until(lambda: access.ended(caller) == "KEY_REVOKED", 2.0)
    assert access.outcome(made) == "key_revoked"
    assert access.outcome(FIRST.reveal()) == "key"
    assert access.value("keys", source="file") == 2
    assert access.value("keys_reloads_total", source="file", outcome="loaded") == 3


async def test_a_file_without_a_change_is_not_loaded_again_and_stays_young(open_access: Open, path: Path, until: Until) -> None:
    access = await open_access(keys_file=path)
    await asyncio.sleep(0.05)
    os.utime(path)
    os.kill(os.getpid(), signal.SIGHUP)
    await until(lambda: access.value("keys_age_seconds", source="file") < 0.04)
    assert access.value("keys_reloads_total", source="file", outcome="loaded") == 1


async def test_sighup_looks_at_once(open_access: Open, path: Path, until: Until, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOK_S", 60.0)
    access = await open_access(keys_file=path)
    with path.open("a") as opened:
        opened.write(text(SECOND))
    assert access.outcome(SECOND.reveal()) == "key_invalid"
    os.kill(os.getpid(), signal.SIGHUP)
    await until(lambda: access.outcome(SECOND.reveal()) == "key", 2.0)


async def test_a_secret_that_kubernetes_swaps_is_followed(open_access: Open, tmp_path: Path, until: Until) -> None:
    """The path is a link to a link to a folder, of which the one in the middle is replaced."""
    for version, key in (("v1", FIRST), ("v2", SECOND)):
        (tmp_path / version).mkdir()
        (tmp_path / version / "keys.toml").touch(0o440)
        (tmp_path / version / "keys.toml").chmod(0o600)
        (tmp_path / version / "keys.toml").write_text(text(key))
        (tmp_path / version / "keys.toml").chmod(0o440)
    (tmp_path / "..data").symlink_to("v1")
    (tmp_path / "keys.toml").symlink_to("..data/keys.toml")
    access = await open_access(keys_file=tmp_path / "keys.toml")
    caller = access.caller(FIRST.reveal())
    (tmp_path / "..new").symlink_to("v2")
    (tmp_path / "..new").replace(tmp_path / "..data")
    await until(lambda: access.outcome(SECOND.reveal()) == "key", 2.0)
    assert (access.ended(caller), access.outcome(FIRST.reveal())) == ("KEY_REVOKED", "key_invalid")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text(text(SECOND) + "[tenant.acme]\nburst = 0\n"),
        lambda path: path.write_text(text(SECOND)[:-1] + "0\n"),
        lambda path: path.write_bytes(b"\xff"),
        lambda path: path.unlink(),
        lambda path: path.chmod(0o644),
    ],
    ids=["bad table", "bad digest", "no text", "gone", "open to all"],
)
async def test_a_bad_file_leaves_the_last_good_keys(
    open_access: Open, path: Path, until: Until, spoil: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "LOOK_S", 0.02)
    access = await open_access(keys_file=path)
    spoil(path)
    await until(lambda: access.value("keys_reloads_total", source="file", outcome="failed") == 1, 3.0)
    await until(lambda: access.value("keys_age_seconds", source="file") > 0.3)
    assert access.outcome(FIRST.reveal()) == "key"
    assert access.value("keys_reloads_total", source="file", outcome="failed") == 1  # counted once for each error that is new
    write(path, text(FIRST) + text(SECOND))
    await until(lambda: access.outcome(SECOND.reveal()) == "key", 3.0)
    assert access.value("keys_age_seconds", source="file") < 0.3


async def test_a_torn_file_is_taken_without_its_last_table(open_access: Open, path: Path, until: Until) -> None:
    write(path, text(FIRST) + text(SECOND)[:-30])
    access = await open_access(keys_file=path)
    assert (access.outcome(FIRST.reveal()), access.outcome(SECOND.reveal())) == ("key", "key_invalid")
    write(path, text(FIRST) + text(SECOND))
    await until(lambda: access.outcome(SECOND.reveal()) == "key", 2.0)


async def test_a_bad_file_at_the_start_is_a_bad_setting_with_its_line(open_access: Open, path: Path) -> None:
    write(path, text(FIRST) + "[tenant.acme]\nburst = 0\n")
    with pytest.raises(BadSettingsError, match=r"keys_file: .*keys\.toml: line 7: \[tenant\.acme\]: burst"):
        await open_access(keys_file=path)
    with pytest.raises(BadSettingsError, match="No such file"):
        await open_access(keys_file=path.with_name("gone"))
    os.chmod(path, 0o644)
    with pytest.raises(BadSettingsError, match="has mode 0644"):
        await open_access(keys_file=path)


def test_a_bad_setting_ends_the_process_with_2() -> None:
    code = """
import sys
from ryzanstein.config import ServiceSettings
from ryzanstein.process.service_process import BadSettingsError, run_service
async def serve(settings):
    raise BadSettingsError("keys_file: line 7")
sys.exit(run_service("router", ServiceSettings(), serve, (OSError,)))
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "keys_file: line 7" in done.stdout + done.stderr) == (2, True)


async def test_a_large_file_is_read_again_only_after_a_change(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ALWAYS_READ_BYTES", 10)
    source, reads = FileKeys(path), []
    original = KeysFile.content
    monkeypatch.setattr(KeysFile, "content", lambda file: reads.append(1) or original(file))
    assert await source.newer() is not None
    for _ in range(2):  # a change just now may not show
        assert await source.newer() is None
    assert len(reads) == 3
    monkeypatch.setattr(module.time, "time", lambda: path.stat().st_ctime + 10)  # type: ignore[attr-defined]
    for _ in range(3):
        assert await source.newer() is None
    assert len(reads) == 4
    with path.open("a") as opened:
        opened.write(text(SECOND))
    snapshot = await source.newer()
    assert snapshot is not None
    assert len(snapshot.keys) == 2
    os.chmod(path, 0o604)
    with pytest.raises(KeysUnreadableError, match="mode 0604"):
        await source.newer()
    os.chmod(path, 0o600)
    assert await source.newer() is None


async def test_nothing_configured_lets_everybody_in(open_access: Open, path: Path) -> None:
    access = await open_access()
    assert access.caller("rz_anything", "acme").tenant == "acme"
    assert access.opened.authenticator.is_open
    off = await open_access(auth="off", keys_file=path)
    assert off.outcome("") == "anonymous"


async def test_optional_keys_let_in_who_sends_none(open_access: Open, path: Path) -> None:
    access = await open_access(auth="optional", keys_file=path)
    outcomes = [access.outcome(secret) for secret in ("", FIRST.reveal(), SECOND.reveal())]
    assert outcomes == ["anonymous", "key", "key_invalid"]


@pytest.mark.parametrize("auth", ["optional", "required"])
def test_auth_without_keys_is_refused_by_name(auth: Any) -> None:
    with pytest.raises(ValueError, match=f"auth {auth} requires keys_file, keys_redis or oidc_issuer"):
        RouterSettings(auth=auth)


async def test_no_key_is_looked_for_in_a_file(open_access: Open, path: Path) -> None:
    """Authenticating reads memory alone: it goes on while the file is gone."""
    access = await open_access(keys_file=path)
    os.unlink(path)
    assert access.opened.authenticator.authenticate(Credential(FIRST.reveal())).tenant == "acme"
