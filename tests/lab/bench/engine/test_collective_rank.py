from __future__ import annotations

import pytest
import torch

from ryzanstein.lab.bench.engine.collectives.messages import OPS
from ryzanstein.lab.bench.engine.collectives.rank import CollectiveProbe, WrongResult
from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.parallel import TensorParallel


@pytest.mark.parametrize("op", OPS)
def test_a_group_that_does_not_exchange_is_found_out(op: str) -> None:
    """Collectives of one rank leave an operand as it is: in a group of two the sum, the gather and the broadcast are wrong."""
    probe = CollectiveProbe(TensorParallel(1, 2, LocalCollectives()), torch.device("cpu"))
    with pytest.raises(WrongResult, match=f"{op} of 600 elements: [1-9][0-9]* are wrong on rank 1"):
        probe.verify(op, 600)


@pytest.mark.parametrize("op", OPS)
def test_runs_are_timed_one_after_the_other(op: str) -> None:
    probe = CollectiveProbe(TensorParallel(0, 1, LocalCollectives()), torch.device("cpu"))
    probe.verify(op, 600)
    ran = probe.time(op, 600, 3)
    times = [time for pair in zip(ran.begun_ns, ran.ended_ns, strict=True) for time in pair]
    assert len(times) == 6
    assert times == sorted(times)
