"""A thousand random schemas with seeds of their own, on a real node: every answer that ends is valid."""

from __future__ import annotations

import pytest
from tests.worker.conftest import *  # noqa: F403  the node, the link and the attempts
from tests.worker.test_constraints import valid_share


@pytest.mark.parametrize("first", range(1000, 2000, 100))
async def test_a_hundred_schemas(link, attempt, first):
    assert await valid_share(link, attempt, range(first, first + 100), n=1 + first // 100 % 3) > 0.85
