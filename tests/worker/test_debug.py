"""What a real node shows of its threads, ranks and requests while it works."""

import pytest

from ryzanstein.rpc.client import open_channel
from ryzanstein.v1 import debug_pb2 as pb
from ryzanstein.v1.debug_pb2_grpc import DebugServiceStub

pytestmark = pytest.mark.cluster


@pytest.fixture
async def debug(node):
    async with open_channel(node.address) as channel:
        yield DebugServiceStub(channel)


async def test_stacks_of_ranks_name_the_functions_in_which_they_are(debug, node, link, attempt) -> None:
    handle = await link.submit(attempt(max_tokens=1800, ignore_eos=True))
    await link.wait(handle, lambda s: len(s.tokens()) > 2)
    answer = await debug.DumpStacks(pb.DumpStacksRequest(), timeout=10)
    await link.cancel(handle)
    agent, *ranks = answer.processes
    assert agent.name == "node-t"
    assert [(rank.name, rank.model, rank.board.rank) for rank in ranks] == [("rank 0", "demo", 0), ("rank 1", "demo", 1)]
    assert [rank.pid for rank in ranks] == sorted(node.rank_pids())
    for rank in ranks:
        main = rank.threads[0]
        assert "loops.py" in main.stack
        assert main.cpu.ToNanoseconds() > 0
        assert rank.board.step > 0
    assert any("in run" in task.stack for task in answer.tasks)


async def test_requests_are_found_with_their_place_in_the_queue(debug, link, attempt) -> None:
    handles = [await link.submit(attempt(max_tokens=1800, ignore_eos=True)) for _ in range(2)]
    for handle in handles:
        await link.wait(handle, lambda s: len(s.tokens()) > 2)
    answer = await debug.FindRequests(pb.FindRequestsRequest(), timeout=10)
    assert [each.stage for each in answer.requests] == [pb.REQUEST_STAGE_DECODE] * 2
    oldest = answer.requests[0]
    assert oldest.model == "demo"
    assert oldest.tokens > 2
    assert oldest.prompt_tokens == oldest.prefilled > 0
    assert oldest.step > 0
    assert oldest.age.ToNanoseconds() > answer.requests[1].age.ToNanoseconds()
    for handle in handles:
        await link.cancel(handle)


async def test_diagnostics_have_versions_settings_and_metrics(debug) -> None:
    answer = await debug.GetDiagnostics(pb.GetDiagnosticsRequest(), timeout=10)
    assert (answer.service, answer.name) == ("worker", "node-t")
    assert '"tp": 2' in answer.settings
    assert "torch" in answer.versions
    assert "ryzanstein_worker_rank_resident_bytes" in answer.metrics
