"""No gRPC request, within the bounds or over them, holds a router's loop for long."""

from __future__ import annotations

import pytest
from tests.hostile.grpc_cost import cost, requests

REQUESTS = requests()
# On a quiet core it is at most 50 ms; a core whose other half works beside it takes two or three times as long.
BOUND_S = 0.15


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.long
def test_each_step_is_short(name: str) -> None:
    answer, steps = cost(*REQUESTS[name])
    assert max(seconds for _, seconds in steps) < BOUND_S, (answer, steps)
