"""What a router tells an operator of its links: who is up, who is suspected, whose breaker is open, what was lost."""

from __future__ import annotations

from typing import Any

import grpc

from ryzanstein.router.telemetry import FAILOVER_CAUSES, LINK_LOSS_CAUSES, SUSPICION_CAUSES
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import router_pb2 as pb
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.v1.router_pb2_grpc import RouterServiceStub


def ask(client: Any, tokens: int = 200) -> Any:
    chat = inference.ChatRequest(
        messages=[inference.Message(role=inference.ROLE_USER, content="hello")],
        sampling=inference.SamplingParams(max_tokens=tokens),
    )
    return client.inference.StreamChat(inference.StreamChatRequest(chat=chat))


async def status_of(client: Any) -> pb.GetRouterStatusResponse:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{client.server.port}") as channel:
        return await RouterServiceStub(channel).GetRouterStatus(pb.GetRouterStatusRequest(), timeout=5)


async def test_a_healthy_link_is_up_closed_and_unsuspected(start_node: Any, start_router: Any) -> None:
    node = await start_node("a")
    client = await start_router(node)
    (link,) = (await status_of(client)).links
    assert (link.node_id, link.address, link.up, link.suspicion) == ("a", node.address, True, "")
    assert link.breaker == pb.BREAKER_STATE_CLOSED
    assert link.state == worker.NODE_STATE_READY


async def test_a_silent_node_is_shown_as_suspected_and_counted_once(start_node: Any, start_router: Any, until: Any) -> None:
    node = await start_node("a", step_s=0.01)
    client = await start_router(node, tuning={"suspicion": {"grace_s": 60.0}})
    stream = ask(client)
    async for response in stream:
        if response.event.HasField("delta"):
            break
    await until(lambda: client.router.links.snapshot()[0].load.running > 0)
    node.frozen = True
    await until(lambda: client.value("node_suspected", node_id="a") == 1)
    (link,) = (await status_of(client)).links
    assert (link.up, link.suspicion, link.inflight) == (True, "silence", 1)
    node.frozen = False
    await until(lambda: client.value("node_suspected", node_id="a") == 0)
    assert (await status_of(client)).links[0].suspicion == ""
    assert client.value("suspicions_total", node_id="a", cause="silence") == 1
    stream.cancel()


async def test_a_lost_link_stays_visible_with_its_cause(start_node: Any, start_router: Any, until: Any) -> None:
    nodes = [await start_node("a", step_s=0.01), await start_node("b", step_s=0.01)]
    client = await start_router(*nodes)
    await nodes[0].die()
    await until(lambda: client.value("link_up", node_id="a") == 0)
    status = await status_of(client)
    assert {link.node_id: (link.up, link.breaker) for link in status.links} == {
        "a": (False, pb.BREAKER_STATE_OPEN),
        "b": (True, pb.BREAKER_STATE_CLOSED),
    }
    (loss,) = status.recent_losses
    assert (loss.node_id, loss.cause) == ("a", "link_lost")
    assert loss.time.seconds > 0


async def test_an_address_that_never_answered_is_listed(start_node: Any, start_router: Any) -> None:
    node = await start_node("a")
    client = await start_router(node, ready_nodes=1, nodes=f"{node.address},127.0.0.1:1")
    down = [link for link in (await status_of(client)).links if not link.up]
    assert [(link.node_id, link.address) for link in down] == [("", "127.0.0.1:1")]


async def test_counters_that_alerts_look_at_exist_before_the_first_fault(start_node: Any, start_router: Any) -> None:
    client = await start_router(await start_node("a"))
    sample = client.router.telemetry.registry.get_sample_value
    for cause in LINK_LOSS_CAUSES:
        assert sample("ryzanstein_router_link_losses_total", {"node_id": "a", "cause": cause}) == 0
    for cause in SUSPICION_CAUSES:
        assert sample("ryzanstein_router_suspicions_total", {"node_id": "a", "cause": cause}) == 0
    for cause in FAILOVER_CAUSES:
        assert sample("ryzanstein_router_failovers_total", {"cause": cause}) == 0


async def test_how_long_a_node_takes_to_accept_is_measured_for_each(start_node: Any, start_router: Any) -> None:
    client = await start_router(await start_node("a", step_s=0.001))
    async for _ in ask(client, 3):
        pass
    assert client.value("time_to_accept_seconds_count", node_id="a") == 1


async def test_the_figures_are_those_of_the_metrics(start_node: Any, start_router: Any) -> None:
    client = await start_router(await start_node("a", step_s=0.001))
    before = (await status_of(client)).figures
    assert (before.generated_tokens, before.running, list(before.time_to_first_token.counts)) == (0, 0, [])
    for tokens in (3, 5):
        async for _ in ask(client, tokens):
            pass
    figures = (await status_of(client)).figures
    assert figures.generated_tokens == 8
    assert dict(figures.ended) == {"complete": 2}
    assert figures.prompt_tokens == client.value("prompt_tokens_total", model="demo") > 0
    first = figures.time_to_first_token
    assert len(first.counts) == len(first.upper_bounds) + 1
    assert list(first.counts) == sorted(first.counts)
    assert first.counts[-1] == 2
    assert 0 < first.sum < 60
    assert figures.start_time == before.start_time


async def test_a_router_without_a_store_knows_only_itself(start_node: Any, start_router: Any) -> None:
    client = await start_router(await start_node("a"))
    port = client.server.port
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        answer = await RouterServiceStub(channel).ListRouters(pb.ListRoutersRequest(), timeout=5)
    (router,) = answer.routers
    assert (router.router_id, router.address) == (client.router.links.router_id, f"127.0.0.1:{port}")
    assert not router.draining
    assert not router.tls
