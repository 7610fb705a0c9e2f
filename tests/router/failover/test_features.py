"""A node that would ignore a part of a request never gets it."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from ryzanstein.generation.request import EXTENDED, PROMPT_CUTS
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as inference

PARAMS = (
    {"bad_words": ["no"]},
    {"allowed_token_ids": [5]},
    {"skip_special_tokens": False},
    {"include_stop_str_in_output": True},
    {"prompt_logprobs": 0},
    {"truncate_prompt_tokens": 8},
    {"keep_prompt_head": 0},
)


def request(session_id: str = "", template: inference.TemplateOptions | None = None, **sampling: Any) -> inference.ChatRequest:
    return inference.ChatRequest(
        messages=[inference.Message(role=inference.ROLE_USER, content="hello")],
        sampling=inference.SamplingParams(max_tokens=2, **sampling),
        template_options=template,
        session_id=session_id,
    )


@pytest.mark.parametrize("params", PARAMS, ids=lambda params: next(iter(params)))
async def test_a_request_goes_only_where_all_of_it_is_known(start_node: Any, start_router: Any, params: dict[str, Any]) -> None:
    old, new = await start_node("old"), await start_node("new", features=(EXTENDED, PROMPT_CUTS))
    client = await start_router(old, new)
    for session in range(6):
        answer = await client.inference.Chat(request(f"s{session}", **params))
        assert answer.node_id == "new"
    assert not old.submits
    (name,) = params
    assert name in {field.name for field, _ in new.submits[0].sampling.ListFields()}


async def test_when_every_node_is_too_old_the_client_is_told_at_once(start_node: Any, start_router: Any) -> None:
    client = await start_router(await start_node("old"))
    template = inference.TemplateOptions(variables='{"thinking":true}')
    for asked in (request(bad_words=["no"]), request(template=template)):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await client.inference.Chat(asked)
        error = error_from_rpc(failed.value)
        assert (error.reason, error.metadata["features"]) == ("NODES_TOO_OLD", EXTENDED)
    assert (await client.inference.Chat(request())).node_id == "old"


async def test_what_asks_for_nothing_new_is_sent_as_an_older_node_knows_it(start_node: Any, start_router: Any) -> None:
    old = await start_node("old")
    client = await start_router(old)
    await client.inference.Chat(request(skip_special_tokens=True, include_stop_str_in_output=False))
    (submit,) = old.submits
    known = {field.name for field, _ in submit.sampling.ListFields()}
    assert not known & {name for params in PARAMS for name in params}
    assert not submit.HasField("template_options")
