"""What a stand-in for a node says of itself, to routers and to the orchestrator."""

from __future__ import annotations

import pytest

from ryzanstein.lab.bench.control.standins.link import StandInState
from ryzanstein.wire.membership import beat_from_wire


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("running", [0, 3])
def test_a_stand_in_tells_the_orchestrator_what_it_tells_routers(busy: bool, running: int) -> None:
    to_routers, to_orchestrator = (StandInState("node-0", ("model-0", "model-1"), busy=busy) for _ in range(2))
    for _ in range(2):
        told = beat_from_wire(to_routers.beat("model-0", running))
        assert to_orchestrator.report(running) == told
    assert told.sequence == 2
