"""`docs/reference/errors.md` and the reasons that the code can give are the same set."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from ryzanstein import errors
from ryzanstein.worker.supervision.group import LossCause

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "errors.md"
SERVICES = ("router", "worker", "orchestrator")
RESERVED = {"UNAUTHENTICATED", "PERMISSION_DENIED"}
# Where the reason is among the arguments of whatever makes an error, by the name of the callable.
MAKERS = {"RyzansteinError": 2, "StoreUnavailableError": 2, "unavailable": 0, "failed_precondition": 0}
KINDS = {"not_found": "{}_NOT_FOUND", "already_exists": "{}_EXISTS"}
# Errors that are passed on: their reasons are made elsewhere.
PASSED_ON = {"failed.reason", "failed.reason or code.name", "code.name", "code_pb2.Code.Name(status.code)", "reason"}
PASSED_ON |= {"f'{kind.upper()}_NOT_FOUND'", "f'{kind.upper()}_EXISTS'"}  # by kind, see KINDS


@cache
def modules() -> list[tuple[Path, ast.Module]]:
    folders = [ROOT / "services" / "ryzanstein" / service for service in SERVICES]
    shared = ROOT / "shared" / "ryzanstein"
    errors = ROOT / "clients" / "python" / "ryzanstein" / "errors.py"
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    paths += [path for path in shared.rglob("*.py") if "v1" not in path.parts]
    return [(path, ast.parse(path.read_text())) for path in sorted([*paths, errors])]


def constants() -> dict[str, str]:
    """Upper-case names that stand for a text, wherever they are defined."""
    found = {}
    for _, module in modules():
        for node in module.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                found |= {target.id: node.value.value for target in node.targets if isinstance(target, ast.Name)}
    return found


def reasons_in(call: ast.Call, position: int, known: dict[str, str]) -> set[str]:
    """Of one call. The reason may be left out, and some are only passed on."""
    named = [keyword.value for keyword in call.keywords if keyword.arg == "reason"]
    argument = named[0] if named else call.args[position] if len(call.args) > position else None
    match argument:
        case None:
            return {"INTERNAL"}
        case ast.Constant(value=str() as reason):
            return {reason}
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in known:
            return {known[name]}
        case _ if ast.unparse(argument) == "loss.cause.value":
            return {cause.value for cause in LossCause}
    assert ast.unparse(argument) in PASSED_ON, f"which reasons are {ast.unparse(argument)!r}?"
    return set()


def name_of(function: ast.expr) -> str:
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


@cache
def reasons_of_code() -> set[str]:
    known, found = constants(), set()
    for _, module in modules():
        for call in (node for node in ast.walk(module) if isinstance(node, ast.Call)):
            name = name_of(call.func)
            if name in MAKERS:
                found |= reasons_in(call, MAKERS[name], known)
            elif name in KINDS and call.args and isinstance(call.args[0], ast.Constant):
                found.add(KINDS[name].format(str(call.args[0].value).upper()))
            elif ast.unparse(call.func) == "super().__init__" and len(call.args) > 2:
                found |= reasons_in(call, 2, known)
    return found


def reasons_of_page() -> set[str]:
    """Of the tables the column of reasons, of the text what is written like one."""
    found: set[str] = set()
    for line in PAGE.read_text().split("## Whose fault it is")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        column = cells[min(len(cells) - 1, 3)] if line.startswith("|") else line
        found |= set(re.findall(r"`([A-Z]+(?:_[A-Z]+)*)`", column))
    return found


def test_every_reason_that_the_code_gives_is_on_the_page() -> None:
    assert reasons_of_code() - reasons_of_page() == set()


def test_every_reason_on_the_page_is_one_that_the_code_gives() -> None:
    assert reasons_of_page() - reasons_of_code() - RESERVED == set()
    assert not RESERVED & reasons_of_code()


@pytest.mark.parametrize("reason", ["RANK_LOST", "NODE_NOT_READY", "SESSION_BUSY", "GENERATION_MOVED", "ATTEMPTS_EXHAUSTED"])
def test_the_reasons_are_found_however_they_are_written(reason: str) -> None:
    assert reason in reasons_of_code()


def test_the_page_says_which_errors_ask_to_try_again() -> None:
    made = [
        errors.queue_full(1, 1),
        errors.out_of_memory(""),
        errors.no_nodes("m", ""),
        errors.draining("n"),
        errors.attempts_exhausted(5, "link_lost"),
        errors.logits_not_finite(""),
        errors.deadline_unreachable(1, 1, 1),
        errors.deadline_exceeded(),
        errors.internal(""),
        errors.context_too_long(1, 1, 1),
    ]
    rows = [line for line in PAGE.read_text().split("## Trying again")[0].splitlines() if line.startswith("|")]
    for error in made:
        for row in (row for row in rows if f"`{error.reason}`" in row.split("|")[4]):
            assert ("RetryInfo" in row) == (error.retry_after_s is not None), row
