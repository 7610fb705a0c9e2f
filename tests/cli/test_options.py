"""Options of every command: a value out of its bounds is exit code 2 and names the option, and never a traceback."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
import typer
from typer.models import OptionInfo
from typer.testing import CliRunner

from ryzanstein.cli.main import build
from ryzanstein.lab.bench.engine.__main__ import app as bench
from ryzanstein.lab.bench.router.__main__ import router as bench_router
from ryzanstein.lab.chaos.__main__ import failover
from ryzanstein.lab.simulation.command import main as simulate
from ryzanstein.tools.synthesize.command import main as synthesize

Command = Callable[..., Any]
BAD = ("-3", "nan", "inf", "1e400", "9" * 30, "many", "")


def commands() -> dict[str, Command]:
    """Every command that reads its options with typer."""
    ours = {each.name or _callback(each).__name__: _callback(each) for each in build().registered_commands}
    theirs = {f"bench {_callback(each).__name__}": _callback(each) for each in bench.registered_commands}
    return {**ours, **theirs, "bench failover": failover, "bench router": bench_router, "synthesize": synthesize}


def _callback(registered: Any) -> Command:
    assert registered.callback is not None
    return registered.callback  # type: ignore[no-any-return]


def numbers() -> Iterator[tuple[str, str, OptionInfo]]:
    """Command, option, and what is known of it."""
    for name, command in commands().items():
        for parameter, hint in get_type_hints(command, include_extras=True).items():
            if get_origin(hint) is Annotated:
                kind, option = get_args(hint)[:2]
                if {kind, *get_args(kind)} & {int, float}:
                    given = option.param_decls or (f"--{parameter.replace('_', '-')}",)
                    yield name, given[0], option


def invoke(command: Command, *arguments: str) -> Any:
    app = typer.Typer(add_completion=False)
    app.command()(command)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def needed(command: Command) -> list[str]:
    """The arguments without which a command is called wrongly anyway."""
    return ["x" for each in inspect.signature(command).parameters.values() if each.default is inspect.Parameter.empty]


@pytest.mark.parametrize(("name", "flag", "option"), list(numbers()), ids=lambda each: each if isinstance(each, str) else "")
def test_every_number_has_two_bounds_and_refuses_what_is_outside(name: str, flag: str, option: OptionInfo) -> None:
    assert option.min is not None
    assert option.max is not None
    for value in (*BAD, str(option.max + 1), str(option.min - 1)):
        done = invoke(commands()[name], *needed(commands()[name]), f"{flag}={value}")
        assert (done.exit_code, flag in done.output) == (2, True), (value, done.output)
        assert "Traceback" not in done.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("chat", "hi", "--max-tokens", "-3"),
        ("chat", "hi", "--temperature", "2.1"),
        ("chat", "a\udcffb"),
        ("chat", "hi", "--session", "\udcff"),
        ("chat", "hi", "--router", ""),
        ("chat", "hi", "--router", "nowhere"),
        ("chat", "hi", "--router", "host:0"),
        ("status", "--orchestrator", "host:99999999999999999999"),
        ("drain", "--direct", "dns:///"),
        ("undrain", "--direct", ":1"),
        ("up", "--quantization", "int3"),
    ],
)
def test_a_value_that_cannot_be_is_exit_code_2_and_names_its_option(arguments: tuple[str, ...]) -> None:
    done = CliRunner().invoke(build(), list(arguments), env={"COLUMNS": "200"})
    named = arguments[-2] if arguments[-2].startswith("--") else "text"
    assert done.exit_code == 2, done.output
    assert f"'{named}'" in done.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("--count", "1", "--jobs", "0"),
        ("--count", "-1"),
        ("--minutes", "nan"),
        ("--minutes", "-1"),
        ("--seed", "x"),
        ("--seed", "1", "--without-faults", "1,x"),
    ],
)
def test_the_simulator_refuses_numbers_that_cannot_be(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        simulate(arguments)
    assert refusal.value.code == 2
    assert f"argument {arguments[-2]}: must be" in capsys.readouterr().err
