"""A node that would ignore a part of a request never gets it."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.prompts import TextPrompt
from ryzanstein.generation.request import CACHE_SCOPES, EXTENDED, PROMPT_CUTS, GenerationRequest, SamplingParams
from ryzanstein.generation.tokens import Started
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


async def test_a_request_of_a_cache_scope_goes_to_no_node_that_would_ignore_it(start_node: Any, start_router: Any) -> None:
    old, new = await start_node("old"), await start_node("new", features=(CACHE_SCOPES,))
    mixed, alone = [(await start_router(*nodes)).router.core for nodes in ((old, new), (old,))]

    async def end(core: Any = mixed, **given: str) -> str:
        asked = GenerationRequest("", TextPrompt("hello"), SamplingParams(max_tokens=2), **given)
        events = [event async for event in core.follow(await core.submit(asked))]
        return next(event.node_id for event in events if isinstance(event, Started))

    assert {await end(cache_scope="a", user=f"u{user}") for user in range(6)} == {"new"}
    assert {submit.cache_scope for submit in new.submits} == {"a"}
    assert not old.submits
    assert {await end(user=f"u{user}") for user in range(12)} == {"old", "new"}
    assert {submit.cache_scope for submit in old.submits} == {""}
    assert old.submits[0].conversation_key not in {submit.conversation_key for submit in new.submits}
    with pytest.raises(RyzansteinError) as refused:
        await end(alone, cache_scope="a")
    assert (refused.value.reason, refused.value.metadata["features"]) == ("NODES_TOO_OLD", CACHE_SCOPES)


async def test_what_asks_for_nothing_new_is_sent_as_an_older_node_knows_it(start_node: Any, start_router: Any) -> None:
    old = await start_node("old")
    client = await start_router(old)
    await client.inference.Chat(request(skip_special_tokens=True, include_stop_str_in_output=False))
    (submit,) = old.submits
    known = {field.name for field, _ in submit.sampling.ListFields()}
    assert not known & {name for params in PARAMS for name in params}
    assert not submit.HasField("template_options")
