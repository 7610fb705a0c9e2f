"""How the command behaves when it is called wrongly, and when nobody answers."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from ryzanstein.cli.main import build
from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.cli.programs import PROGRAMS


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build(), list(arguments), env={"COLUMNS": "200"})
    return result.exit_code, result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("no-such-command",),
        ("up", "--nodes", "0"),
        ("up", "--model", "/no/such/directory"),
        ("up", "--http-port", "65536"),
        ("chat", "--temperature", "warm"),
        ("deploy",),
        ("drain",),
        ("drain", "node-0", "--direct", "127.0.0.1:1"),
        ("status", "unexpected"),
    ],
)
def test_wrong_calls_are_exit_code_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments)[0] == 2


def test_the_version_is_printed() -> None:
    code, output = run("--version")
    assert (code, output.split()[0]) == (0, "ryzanstein")


def test_the_help_lists_every_command() -> None:
    _, output = run("--help")
    for name in ("up", "chat", "status", "deploy", "drain", "demo", *PROGRAMS):
        assert f" {name} " in output


def test_nobody_there_is_exit_code_1_with_a_hint() -> None:
    (port,) = free_ports(1)
    code, output = run("chat", "Hello!", "--router", f"127.0.0.1:{port}")
    assert code == 1
    assert "UNAVAILABLE" in output
    assert "ryzanstein up" in output


def test_status_with_everything_down_is_one_sentence_and_exit_code_1() -> None:
    first, second = (f"127.0.0.1:{port}" for port in free_ports(2))
    code, output = run("status", "--orchestrator", first, "--router", second)
    assert code == 1
    (sentence,) = output.splitlines()
    assert sentence.startswith(f"nothing answers: no orchestrator at {first}, no router at {second};")


def test_status_without_services_says_who_did_not_answer() -> None:
    first, second = free_ports(2)
    code, output = run("status", "--json", "--orchestrator", f"127.0.0.1:{first}", "--router", f"127.0.0.1:{second}")
    assert code == 1
    assert '"nodes": []' in output
    assert "orchestrator did not answer" in output
    assert "router did not answer" in output
