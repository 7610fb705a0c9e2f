"""Settings of every service: a number without an end and text that cannot be written down are refused, by name.

Settings of an earlier release are taken, and put where they are now.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_settings import CliApp

from ryzanstein.config import ServiceSettings, flag, in_tuning, moved_flags, place_of, variable
from ryzanstein.orchestrator.config import OrchestratorSettings
from ryzanstein.process.service_process import read_settings
from ryzanstein.router.config import RouterSettings
from ryzanstein.worker.config import WorkerSettings

KINDS = (RouterSettings, OrchestratorSettings, WorkerSettings)
NOT_NUMBERS = ("nan", "inf", "-inf", "1e400", "-3", "99999999999999999999999", "many", "")


def fields(*annotations: type) -> list[tuple[type[ServiceSettings], str]]:
    return [(kind, name) for kind in KINDS for name, field in kind.model_fields.items() if field.annotation in annotations]


def refused(kind: type[ServiceSettings], name: str, value: Any) -> list[str]:
    """The settings that the refusal names; empty when it was no refusal."""
    try:
        kind(**{name: value})
    except ValidationError as error:
        return [".".join(map(str, problem["loc"])) for problem in error.errors()]
    return []


@pytest.mark.parametrize("value", NOT_NUMBERS)
def test_no_number_of_any_service_is_endless_or_none(value: str) -> None:
    numbers = fields(int, float)
    assert len(numbers) > 50
    assert [(kind, name) for kind, name in numbers if refused(kind, name, value) != [name]] == []


def test_no_text_of_any_service_is_beyond_utf_8() -> None:
    texts = fields(str)
    assert len(texts) > 10
    assert [(kind, name) for kind, name in texts if refused(kind, name, "a\udcffb") != [name]] == []


MOVED = [(kind, name) for kind in KINDS for name in kind.moved if place_of(kind, name).startswith("tuning.")]


@pytest.mark.parametrize("value", NOT_NUMBERS)
def test_no_constant_is_endless_or_none(value: str) -> None:
    assert len(MOVED) > 70
    answers = [(kind, name, refused(kind, "tuning", in_tuning(kind, [(name, value)])["tuning"])) for kind, name in MOVED]
    assert [(kind, name) for kind, name, named in answers if named != [f"tuning.{kind.moved[name]}"]] == []


def constant(settings: ServiceSettings, name: str) -> Any:
    return functools.reduce(getattr, ("tuning", *settings.moved[name].split(".")), settings)


@pytest.mark.parametrize("kind", KINDS)
def test_a_setting_of_an_earlier_release_is_taken_from_the_environment_and_from_flags(
    kind: type[ServiceSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = kind()
    for name in (name for other, name in MOVED if other is kind):
        value = constant(usual, name)
        assert name not in kind.model_fields
        with monkeypatch.context() as environment:
            environment.setenv(variable(name), f"{value}")
            assert kind() == usual
            environment.setenv(variable(name), "nothing")
            with pytest.raises(ValidationError, match=kind.moved[name]):
                kind()
        for arguments in ([flag(name), f"{value}"], [f"{flag(name)}={value}"]):
            kept, moved = moved_flags(kind, ["--host", "::", *arguments, "--log-files", "2"])
            assert kept == ["--host", "::", "--log-files", "2"]
            assert (
                CliApp.run(kind, kept, **in_tuning(kind, moved.items())).model_dump()["tuning"] == usual.model_dump()["tuning"]
            )


def read(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> RouterSettings:
    monkeypatch.setattr("sys.argv", ["router", *arguments])
    return read_settings(RouterSettings)


def test_a_renamed_setting_is_taken_under_its_former_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch).failover_to_incompatible
    assert not read(monkeypatch, "--no-failover-to-unlike").failover_to_incompatible
    assert not read(monkeypatch, "--failover-to-unlike=false").failover_to_incompatible
    monkeypatch.setenv("RYZANSTEIN_FAILOVER_TO_UNLIKE", "false")
    assert not read(monkeypatch).failover_to_incompatible
    assert read(monkeypatch, "--failover-to-unlike").failover_to_incompatible


def test_flags_win_over_the_environment_and_new_names_over_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RYZANSTEIN_STALL_S", "1")
    monkeypatch.setenv("ryzanstein_accept_s", "2")
    monkeypatch.setenv("RYZANSTEIN_DEAD_GRACE_S", "3")
    monkeypatch.setenv("RYZANSTEIN_TUNING", '{"suspicion": {"grace_s": 4, "stall_steps": 5}, "claim_ttl_s": 6}')
    tuning = read(monkeypatch, "--stall-steps", "7", "--hedge-min=8", "--tuning", '{"hedges": {"least": 9}}').tuning
    assert (tuning.suspicion.stall_s, tuning.patience.accept_s, tuning.suspicion.grace_s) == (1, 2, 4)
    assert (tuning.suspicion.stall_steps, tuning.claim_ttl_s, tuning.hedges.least) == (7, 6, 9)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('{"suspicion": {"patience_s": 1}}', "tuning.suspicion.patience_s: Unexpected keyword argument"),
        ('{"stall_s": 1}', "tuning.stall_s: Unexpected keyword argument"),
        ('{"suspicion": {"stall_s": 0}}', "tuning.suspicion.stall_s: Input should be greater than 0"),
        (
            '{"balance": {"thresholds": {"calm": 0.2}}}',
            "tuning.balance.thresholds: Value error, must be calm < alarm <= switch",
        ),
        ('{"suspicion": 3}', "tuning.suspicion: Input should be a dictionary"),
        ("[1]", "tuning: Input should be a dictionary"),
        ('{"suspicion"', 'settings: error parsing value for field "tuning"'),
    ],
)
def test_a_constant_that_is_unknown_or_out_of_bounds_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str, message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        read(monkeypatch, "--tuning", value)
    assert message in capsys.readouterr().err
    monkeypatch.setenv("RYZANSTEIN_TUNING", value)
    with pytest.raises(SystemExit, match="2"):
        read(monkeypatch)
    assert message in capsys.readouterr().err
