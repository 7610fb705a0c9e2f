"""What an agent says of its engine, and that it refuses what the engine does not support."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from tests.worker.agent.test_waking import SleepingNode

from ryzanstein.cluster import OWN_ENGINE, EngineTraits
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import TextPrompt
from ryzanstein.generation.request import Attempt, ChoiceProgress, GenerationRequest, SamplingParams
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.wire.attempts import submit_now
from ryzanstein.worker.engine.messages import SubmitGroup

LLAMA = EngineTraits("llama.cpp b7200", frozenset({"presence_penalty", "embeddings"}), continues_exactly=False)


class ForeignNode(SleepingNode):
    """A node whose ranks are announced as an engine of others."""

    async def start(self) -> None:
        await super().start()
        await self.node.host.wake()
        assert self.node.host.serving is not None
        self.node.host.serving = replace(self.node.host.serving, engine=LLAMA)

    async def failed(self) -> pb.Failed:
        async for frame in self.link.frames():
            if frame.output.failed:
                return frame.output.failed[0]
        raise AssertionError("the stream ended")


@pytest.fixture
async def foreign() -> AsyncIterator[ForeignNode]:
    node = ForeignNode()
    await node.start()
    yield node
    node.disconnect()
    await node.node.versions.unload()
    await node.node.background.close()


def submit(number: int, **sampling: Any) -> pb.ConnectRequest:
    request = GenerationRequest("", TextPrompt("hello"), SamplingParams(max_tokens=2, seed=1, **sampling))
    return pb.ConnectRequest(submit=submit_now(Attempt(f"g{number}", 1, request, (ChoiceProgress(),)), number))


async def test_beats_say_what_the_engine_is_also_while_it_sleeps(foreign: ForeignNode) -> None:
    assert foreign.node.beat().engine == LLAMA
    await foreign.node.idleness.sleep()
    assert foreign.node.beat().engine == LLAMA
    await foreign.node.host.wake()
    assert foreign.node.beat().engine == OWN_ENGINE


async def test_what_the_engine_does_not_support_is_refused_by_name_and_the_rest_is_answered(foreign: ForeignNode) -> None:
    await foreign.send(submit(1, presence_penalty=1.0))
    failed = await foreign.failed()
    assert (failed.handle, failed.code, failed.reason) == (1, Code.FAILED_PRECONDITION, "ENGINE_LACKS")
    assert failed.metadata["field"] == "sampling.presence_penalty"
    assert not failed.node_fault
    await foreign.send(submit(2, frequency_penalty=1.0))
    assert await foreign.outputs(1) == ([2], [])


async def test_an_engine_without_embeddings_makes_no_vector(foreign: ForeignNode) -> None:
    text = foreign.node.host.text
    assert text is not None
    group = SubmitGroup(
        group=1,
        prompt_ids=[1],
        sampling=SamplingParams(max_tokens=1, seed=0),
        max_tokens=1,
        stop_token_ids=[],
        generated=[[]],
        finished=[False],
    )
    with pytest.raises(RyzansteinError) as refused:
        await foreign.node.submissions.vector(text, group)
    assert (refused.value.reason, refused.value.metadata["field"]) == ("ENGINE_LACKS", "embeddings")
