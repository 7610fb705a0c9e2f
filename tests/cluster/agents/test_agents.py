"""Agents' frameworks, unchanged, each in its own environment: loops of three steps that send back what each step returned.

`bash .ci/parts clients` installs them. Whether a small model calls a function is up to it, so calls are required
where the loop needs one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cluster.agents.conftest import BUILD, PROGRAMS, Served

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

PYTHON = {"openai": "python", "instructor": "instructor", "langchain": "python", "pydantic_ai": "python"}


def check(served: Served, program: list[str], folder: Path, loops: int) -> None:
    """Each loop ends as it should, and no request is refused but those that must be."""
    before = served.answered()
    given = served.run(program, folder)
    assert [each for each in given if "error" in each] == []
    assert len(given) == loops
    answered = served.answered() - before
    assert answered["400"] == sum("refused" in each for each in given)
    assert set(answered) <= {"200", "400", "499"}, answered


@pytest.mark.parametrize(("client", "loops"), [("openai", 8), ("instructor", 15), ("langchain", 19), ("pydantic_ai", 15)])
def test_loops_in_python(served: Served, client: str, loops: int) -> None:
    python = BUILD / "clients" / PYTHON[client] / "bin/python"
    assert python.exists(), f"{python} is missing: `bash .ci/parts clients` installs it"
    check(served, [str(python), str(PROGRAMS / f"{client}_loops.py")], PROGRAMS, loops)


@pytest.mark.parametrize(("client", "loops"), [("openai", 8), ("vercel", 15)])
def test_loops_in_node(served: Served, client: str, loops: int, node_programs: Path, part) -> None:
    assert (BUILD / "clients/node/node_modules").exists(), "npm packages are missing: `bash .ci/parts clients` installs them"
    check(served, [part("node"), f"{client}_loops.mjs"], node_programs, loops)
