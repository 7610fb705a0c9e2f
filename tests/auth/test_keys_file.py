"""The keys file on disk: who may read it, commands that append at the same time, and what they leave when they die."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ryzanstein.auth.caller import DEFAULT_SCOPES
from ryzanstein.auth.key_form import ApiKey
from ryzanstein.auth.keys.keys_file import KeyExistsError, KeysFile, KeysFileError, NoSuchKeyError
from ryzanstein.auth.keys.keys_text import key_text
from ryzanstein.auth.keys.records import KeyRecord

KEY = ApiKey("0123456789AB", "a" * 43)
RECORD = KeyRecord(KEY.key_id, KEY.digest(), "acme", DEFAULT_SCOPES, created=1.7e9, expires=4e9, note="for a test")
OTHER = replace(RECORD, key_id="B" * 12)


@pytest.fixture
def file(tmp_path: Path) -> KeysFile:
    return KeysFile(tmp_path / "access" / "keys.toml")


def test_a_key_is_added_found_and_revoked(file: KeysFile) -> None:
    file.add(RECORD)
    file.add(OTHER)
    assert dict(file.read().keys) == {RECORD.key_id: RECORD, OTHER.key_id: OTHER}
    assert file.revoke(RECORD.key_id, 1.8e9)
    assert not file.revoke(RECORD.key_id, 1.9e9)
    assert dict(file.read().revoked) == {RECORD.key_id: 1.8e9}
    with pytest.raises(NoSuchKeyError):
        file.revoke("C" * 12, 1.8e9)
    with pytest.raises(KeyExistsError):
        file.add(RECORD)


def test_a_new_file_and_its_folder_are_private(file: KeysFile) -> None:
    before = os.umask(0)
    try:
        file.add(RECORD)
    finally:
        os.umask(before)
    assert (file.path.stat().st_mode & 0o777, file.path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440])
def test_a_file_that_only_its_owner_and_group_read_is_accepted(file: KeysFile, mode: int) -> None:
    file.add(RECORD)
    file.path.chmod(mode)
    assert len(file.read().keys) == 1


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o620, 0o602, 0o601])
def test_a_file_that_others_may_read_or_its_group_may_write_is_refused(file: KeysFile, mode: int) -> None:
    file.add(RECORD)
    file.path.chmod(mode)
    for use in (file.read, lambda: file.add(OTHER), lambda: file.revoke(RECORD.key_id, 1.0)):
        with pytest.raises(KeysFileError, match=f"has mode {mode:04o}.*0600, 0400, 0640 and 0440"):
            use()


def test_no_file_a_folder_and_a_pipe_are_refused_by_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir(0o700)
    for name, told in (("gone", "No such file"), ("folder", "is no file"), ("pipe", "is no file")):
        with pytest.raises(KeysFileError, match=f"{name}: {told}"):
            KeysFile(tmp_path / name).read()
    with pytest.raises(KeysFileError, match="No such file"):
        KeysFile(tmp_path / "gone").revoke("A" * 12, 1.0)
    assert not (tmp_path / "gone").exists()


def test_a_bad_file_is_named_with_its_line_and_is_not_appended_to(file: KeysFile) -> None:
    file.add(RECORD)
    bad = file.path.read_bytes() + b"[tenant.acme]\nburst = 0\n"
    file.path.write_bytes(bad)
    for use in (file.read, lambda: file.add(OTHER)):
        with pytest.raises(KeysFileError, match=r"keys\.toml: line 9: \[tenant\.acme\]: burst"):
            use()
    assert file.path.read_bytes() == bad


@pytest.mark.parametrize("torn", [b"[[ke", b"[[key]]\nid = ", key_text(OTHER).encode()[:-3], b"\0" * 4096])
def test_what_was_written_in_part_is_left_out_and_replaced_by_the_next_key(file: KeysFile, torn: bytes) -> None:
    file.add(RECORD)
    whole = file.path.read_bytes()
    file.path.write_bytes(whole + torn)
    assert list(file.read().keys) == [RECORD.key_id]
    file.add(OTHER)
    assert file.path.read_bytes() == whole + key_text(OTHER).encode()


def test_a_last_line_by_hand_without_an_end_stays(file: KeysFile) -> None:
    file.add(RECORD)
    with file.path.open("a") as opened:
        opened.write("[tenant.acme]\nsessions = 3")
    file.add(OTHER)
    read = file.read()
    assert (len(read.keys), read.tenants["acme"].limits.sessions) == (2, 3)


def test_a_key_that_finds_no_room_leaves_the_file_as_it_was(file: KeysFile) -> None:
    """A child process, whose files may not grow beyond a part of the second key."""
    file.add(RECORD)
    whole = file.path.read_bytes()
    code = f"""
import resource, signal, sys
from pathlib import Path
from ryzanstein.auth.caller import DEFAULT_SCOPES
from ryzanstein.auth.keys.keys_file import KeysFile, KeysFileError
from ryzanstein.auth.keys.records import KeyRecord
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({len(whole) + 100}, {len(whole) + 100}))
try:
    KeysFile(Path({str(file.path)!r})).add(KeyRecord("B" * 12, "0" * 64, "acme", DEFAULT_SCOPES))
except KeysFileError as error:
    sys.exit(str(error))
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "File too large" in done.stderr) == (1, True), done.stderr
    assert file.path.read_bytes() == whole


ADD = """
import sys
from pathlib import Path
from ryzanstein.auth.caller import DEFAULT_SCOPES
from ryzanstein.auth.key_form import ApiKey
from ryzanstein.auth.keys.keys_file import KeysFile
from ryzanstein.auth.keys.records import KeyRecord
sys.stdin.readline()
file = KeysFile(Path(sys.argv[1]))
for number in range(int(sys.argv[2])):
    key = ApiKey.new()
    file.add(KeyRecord(key.key_id, key.digest(), f"tenant-{number}", DEFAULT_SCOPES))
    if number % 2:
        file.revoke(key.key_id, 1.0)
    print(key.key_id, flush=True)
"""


def test_commands_at_the_same_time_lose_nothing(file: KeysFile) -> None:
    appenders = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", ADD, str(file.path), "20"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for each in appenders:  # all at once: the file does not exist yet
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    made = [each.communicate(timeout=60)[0].split() for each in appenders]
    assert [each.returncode for each in appenders] == [0, 0, 0]
    read = file.read()
    assert set(read.keys) == {key_id for each in made for key_id in each}
    assert set(read.revoked) == {key_id for each in made for key_id in each[1::2]}


def test_a_command_that_is_killed_loses_no_key_that_was_shown(file: KeysFile) -> None:
    for _ in range(3):
        command = [sys.executable, "-P", "-c", ADD, str(file.path), "100000"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as appender:
            assert appender.stdin is not None
            assert appender.stdout is not None
            appender.stdin.write("\n")
            appender.stdin.flush()
            shown = [appender.stdout.readline().strip() for _ in range(20)]
            appender.kill()
            shown += appender.stdout.read().split()
        assert set(shown) <= set(file.read().keys)
    file.add(RECORD)


def test_a_file_that_an_editor_replaced_meanwhile_gets_the_key(file: KeysFile) -> None:
    """The command waits for the lock of the old file, which is then no longer the one at the path."""
    file.add(RECORD)
    with file._alone(create=False):
        command = [sys.executable, "-P", "-c", ADD, str(file.path), "1"]
        appender = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert appender.stdin is not None
        appender.stdin.write("\n")
        appender.stdin.flush()
        waits_for_lock(appender.pid)
        edited = file.path.with_suffix(".new")
        edited.touch(0o600)
        edited.write_text(f"[tenant.acme]\n{key_text(RECORD)}")
        edited.replace(file.path)
    shown = appender.communicate(timeout=60)[0].split()
    assert set(file.read().keys) == {RECORD.key_id, *shown}
    assert list(file.read().tenants) == ["acme"]


def waits_for_lock(pid: int) -> None:
    """Returns when a process waits for a lock; the kernel lists those."""
    for _ in range(3000):
        if any("->" in line and f" {pid} " in line for line in Path("/proc/locks").read_text().splitlines()):
            return
        time.sleep(0.01)
    raise AssertionError("the process waits for no lock")
