"""`ryzanstein keys`: what is printed where, and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ryzanstein.auth.caller import DEFAULT_SCOPES
from ryzanstein.auth.key_form import ApiKey
from ryzanstein.auth.keys.keys_file import KeysFile
from ryzanstein.cli.keys.times import end_of
from ryzanstein.cli.main import build

Run = Callable[..., tuple[int, str, str]]
NO_SETTINGS = {"RYZANSTEIN_KEYS_FILE": None, "RYZANSTEIN_REDIS_URL": None, "COLUMNS": "200"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


@pytest.fixture
def run(file: Path) -> Run:
    """Runs a command on the test's file: exit code, standard output, standard error."""

    def run(*words: str, given: str = "") -> tuple[int, str, str]:
        result = CliRunner().invoke(build(), ["keys", *words, "--file", str(file)], input=given, env=NO_SETTINGS)
        return result.exit_code, result.stdout, result.stderr

    return run


def test_a_new_key_is_alone_on_standard_output(run: Run, file: Path) -> None:
    code, out, err = run("add", "acme", "--note", "laptop [red]of Ada[/red]")
    key = ApiKey.parse(out.removesuffix("\n"))
    assert key is not None
    assert (code, key.key_id in err, key.secret in err) == (0, True, False)
    record = KeysFile(file).read().keys[key.key_id]
    assert (record.tenant, record.scopes, record.models, record.expires) == ("acme", DEFAULT_SCOPES, None, None)
    assert record.note == "laptop [red]of Ada[/red]"
    assert key.secret not in file.read_text()


def test_a_key_has_what_the_options_say(run: Run) -> None:
    _, out, _ = run(
        *("add", "acme", "--scope", "infer", "--scope", "act_as", "--model", "demo", "--model", "a=b"),
        *("--expires", "2099-01-31", "--max-priority", "-3"),
    )
    code, checked, _ = run("check", given=out)
    answer = json.loads(checked)
    assert (code, answer["state"], answer["scopes"], answer["models"]) == (0, "valid", ["act_as", "infer"], ["a=b", "demo"])
    assert (answer["expires"], answer["max_priority"]) == ("2099-01-31T00:00:00+00:00", -3)


def test_a_revoked_key_is_listed_and_no_longer_valid(run: Run) -> None:
    first, second = (run("add", tenant)[1].strip() for tenant in ("acme", "globex"))
    assert run("revoke", first[3:15])[0] == 0
    assert "already" in run("revoke", first[3:15])[2]
    code, out, err = run("check", given=first)
    assert (code, out, "was revoked" in err) == (1, "", True)
    assert run("check", given=second)[0] == 0
    listed = json.loads(run("list", "--json")[1])["keys"]
    assert [(row["id"], row["state"]) for row in listed] == [(first[3:15], "revoked"), (second[3:15], "valid")]
    code, table, _ = run("list")
    assert (code, first[3:15] in table, "revoked" in table, "globex" in table) == (0, True, True, True)


def test_no_listing_has_a_secret_or_a_digest(run: Run, file: Path) -> None:
    made = run("add", "acme")[1].strip()
    key = ApiKey.parse(made)
    assert key is not None
    seen = "".join("".join(run(*words, given=made)[1:]) for words in (("list",), ("list", "--json"), ("check",)))
    assert [text for text in (key.secret, key.digest()) if text in seen] == []


def test_a_note_is_shown_as_it_is(run: Run) -> None:
    run("add", "acme", "--note", "[bold]x[/bold]")
    assert "[bold]x[/bold]" in run("list")[1]


@pytest.mark.parametrize("given", ["", "sk-other", "rz_", "x" * 10_000], ids=["nothing", "another", "a part", "much"])
def test_what_is_no_key_is_exit_code_1(run: Run, given: str) -> None:
    run("add", "acme")
    code, out, err = run("check", given=given)
    assert (code, out, err.strip()) == (1, "", "the API key is not valid")


def test_an_unknown_key_is_exit_code_1(run: Run) -> None:
    run("add", "acme")
    assert run("check", given=ApiKey.new().reveal())[0] == 1
    code, _, err = run("revoke", "0" * 12)
    assert (code, "there is no key 000000000000" in err) == (1, True)


@pytest.mark.parametrize(
    "words",
    [
        ("add", "a b"),
        ("add", "*"),
        ("add", "acme", "--scope", "all"),
        ("add", "acme", "--max-priority", "11"),
        ("add", "acme", "--note", "a\nb"),
        ("add", "acme", "--expires", "tomorrow"),
        ("add", "acme", "--expires", "2001-01-01"),
        ("add", "acme", "--expires", "0d"),
        ("add", "acme", "--redis-url", "redis://127.0.0.1"),
        ("add",),
        ("revoke", "short"),
    ],
)
def test_wrong_calls_are_exit_code_2_and_change_nothing(run: Run, file: Path, words: tuple[str, ...]) -> None:
    assert run(*words)[0] == 2
    assert not file.exists()


def test_a_whole_key_given_for_an_id_is_not_repeated(run: Run) -> None:
    made = run("add", "acme")[1].strip()
    code, out, err = run("revoke", made)
    assert (code, made in out + err) == (2, False)


def test_a_bad_file_is_one_sentence_and_exit_code_1(run: Run, file: Path) -> None:
    file.touch(0o600)
    file.write_text("[tenant.acme]\ncolour = 1\n")
    for words in (("add", "acme"), ("list",), ("check",), ("revoke", "0" * 12)):
        code, out, err = run(*words)
        assert (code, out) == (1, "")
        assert "keys.toml: line 1: [tenant.acme]: no such field: 'colour'" in err
    file.chmod(0o644)
    assert "has mode 0644" in run("list")[2]


def test_the_place_of_the_keys_comes_from_the_environment_as_for_a_router(file: Path, tmp_path: Path) -> None:
    runner, app = CliRunner(), build()
    made = runner.invoke(app, ["keys", "add", "acme"], env=NO_SETTINGS | {"RYZANSTEIN_KEYS_FILE": str(file)})
    assert (made.exit_code, len(KeysFile(file).read().keys)) == (0, 1)
    both = {"RYZANSTEIN_KEYS_FILE": str(file), "RYZANSTEIN_REDIS_URL": "redis://127.0.0.1:1"}
    assert runner.invoke(app, ["keys", "list"], env=NO_SETTINGS | both).exit_code == 0
    away = runner.invoke(app, ["keys", "list"], env=NO_SETTINGS | {"RYZANSTEIN_REDIS_URL": "redis://:canary@127.0.0.1:1"})
    assert (away.exit_code, "Redis cannot be used" in away.stderr, "canary" in away.output) == (1, True, False)
    assert runner.invoke(app, ["keys", "list"], env=NO_SETTINGS).exit_code == 2


def test_a_key_can_be_piped(file: Path) -> None:
    program = Path(sys.executable).with_name("ryzanstein")
    line = f"{program} keys add acme --file {file} 2>/dev/null | {program} keys check --file {file}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["tenant"] == "acme"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(None, None), ("90d", 90 * 86400), ("12h", 43200), ("5m", 300)],
)
def test_an_end_is_a_span(text: str | None, seconds: float | None) -> None:
    now = float(int(time.time()))
    assert end_of(text, now) == (None if seconds is None else now + seconds)


def test_an_end_is_a_date_or_a_time() -> None:
    expected = datetime(2099, 1, 31, 11, tzinfo=UTC).timestamp()
    assert end_of("2099-01-31T12:00:00+01:00", 0.0) == expected
    assert end_of("2099-01-31T11:00:00", 0.0) == expected
    for wrong in ("1970-01-01", "99999999d", "1.5d", "", "-1d"):
        with pytest.raises(typer.BadParameter, match="must be"):
            end_of(wrong, 1.7e9)


def test_each_change_says_on_standard_error_who_made_it(run: Run) -> None:
    _, out, added = run("add", "acme")
    key = ApiKey.parse(out.strip())
    assert key is not None
    _, _, revoked = run("revoke", key.key_id)
    _, _, failed = run("revoke", "0" * 12)
    records = [json.loads(next(line for line in err.splitlines() if line.startswith("{"))) for err in (added, revoked, failed)]
    assert [(each["method"], each["target"], each["outcome"]) for each in records] == [
        ("keys add", key.key_id, "done"),
        ("keys revoke", key.key_id, "done"),
        ("keys revoke", "0" * 12, "failed"),
    ]
    assert all(each["audit"] and each["uid"] == os.getuid() for each in records)
    assert key.secret not in added + revoked
