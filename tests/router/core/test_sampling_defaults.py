"""The router fills in a model's own sampling values once, so that each attempt of a generation has the same ones."""

from __future__ import annotations

from typing import Any

from ryzanstein.v1 import inference_pb2 as inference

OWN = {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.25}


def request(session_id: str = "", **sampling: Any) -> inference.ChatRequest:
    messages = [inference.Message(role=inference.ROLE_USER, content="hello")]
    return inference.ChatRequest(
        messages=messages, sampling=inference.SamplingParams(max_tokens=8, **sampling), session_id=session_id
    )


def sent(node: Any) -> list[tuple[float, int, float, float]]:
    params = [submit.sampling for submit in node.submits]
    return [(each.temperature, each.top_k, each.top_p, each.repetition_penalty) for each in params]


async def test_a_request_gets_the_models_values_where_it_says_nothing(start_node: Any, start_router: Any, until: Any) -> None:
    node = await start_node("a", sampling_defaults=OWN)
    client = await start_router(node)
    await client.inference.Chat(request())
    await client.inference.Chat(request(temperature=1.0, top_k=3))
    first, second = sent(node)
    assert first[:2] + first[3:] == (0.5, 20, 1.25)
    assert second[:2] + second[3:] == (1.0, 3, 1.25)
    (model,) = (await client.inference.ListModels(inference.ListModelsRequest())).models
    assert model.sampling_defaults == inference.SamplingDefaults(**OWN)


async def test_after_a_failover_the_values_are_those_of_before(start_node: Any, start_router: Any) -> None:
    """Also where the other node has others."""
    one, two = await start_node("a", sampling_defaults=OWN), await start_node("b", sampling_defaults={"temperature": 0.75})
    client = await start_router(one, two)
    first = (await client.inference.Chat(request("s"))).node_id
    primary, other = (one, two) if first == "a" else (two, one)
    primary.die_at = 3
    answer = await client.inference.Chat(request("s"))
    assert answer.node_id == other.node_id
    assert sent(other) == sent(primary)[-1:]
    assert sent(other)[0][0] == 0.5, "the first node by name counts"
