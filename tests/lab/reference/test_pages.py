"""The generated pages of docs/reference/ say what the code says."""

from __future__ import annotations

import pytest

from ryzanstein.lab.reference.__main__ import FOLDER, PAGES

# Help is printed by a process for each command.
NAMES = [pytest.param(name, marks=pytest.mark.long) if name == "cli.md" else name for name in PAGES]


@pytest.mark.parametrize("name", NAMES)
def test_a_generated_page_is_as_the_code_has_it(name: str) -> None:
    assert (FOLDER / name).read_text() == PAGES[name](), "run `python -P -m ryzanstein.lab.reference`"
