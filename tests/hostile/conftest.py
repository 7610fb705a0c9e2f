from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.hostile.victim import Victim, victim


@pytest.fixture(scope="module")
def router() -> Iterator[Victim]:
    """One for all of a module's inputs: what an earlier one left behind is part of the test."""
    with victim() as made:
        yield made
