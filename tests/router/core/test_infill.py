"""Prompts to fill in the middle are run whole: what is in their own middle says where the answer goes."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from ryzanstein.generation import CONSTRAINTS, PROMPT_CUTS
from ryzanstein.router.nodes.calls import texts
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as inference


@pytest.fixture
def infill(monkeypatch: pytest.MonkeyPatch) -> None:
    async def filled(*_: Any) -> texts.Infilled:
        return texts.Infilled([1, 2, 3], [4])

    monkeypatch.setattr(texts, "infill", filled)


def asked(**sampling: Any) -> inference.CompleteRequest:
    return inference.CompleteRequest(text="a", suffix="z", sampling=inference.SamplingParams(max_tokens=2, **sampling))


async def test_the_default_of_the_router_cuts_none(start_node: Any, start_router: Any, infill: None) -> None:
    node = await start_node("a", features=(CONSTRAINTS, PROMPT_CUTS))
    client = await start_router(node, keep_prompt_head=0)
    await client.inference.Complete(asked())
    (submit,) = node.submits
    assert list(submit.token_ids.ids) == [1, 2, 3]
    assert not submit.sampling.HasField("keep_prompt_head")


@pytest.mark.parametrize("name", ["keep_prompt_head", "truncate_prompt_tokens"])
async def test_a_request_to_cut_one_is_refused(start_node: Any, start_router: Any, infill: None, name: str) -> None:
    client = await start_router(await start_node("a"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.inference.Complete(asked(**{name: 1}))
    assert [each.field for each in error_from_rpc(caught.value).violations] == [f"sampling.{name}"]
