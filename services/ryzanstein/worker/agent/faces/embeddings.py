"""EmbeddingService on a node: tokenizes the inputs, has the engine pool each, and finishes the vectors.

An input is a group of the engine like a generation, so it is batched with them, has its turn by
priority and tenant, and ends with its deadline or its call. At most `MAX_AT_ONCE` inputs of a call
are in the engine: the rest of a large call does not fill the queue.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from grpc.aio import ServicerContext

from ryzanstein import errors
from ryzanstein.embeddings import Embedded, EmbeddingRequest, EmbedInput, check_numbers, no_embeddings
from ryzanstein.errors import FieldViolation, RyzansteinError
from ryzanstein.generation.prompts import TENANT_ID, TextPrompt, TokenPrompt, valid_tenant
from ryzanstein.generation.request import SamplingParams
from ryzanstein.v1 import embedding_pb2 as pb
from ryzanstein.v1.embedding_pb2_grpc import EmbeddingServiceServicer
from ryzanstein.wire.embeddings import embed_from_wire, embedded_to_wire
from ryzanstein.wire.requests import cache_scope_from_wire
from ryzanstein.worker.agent.models import NodeModels
from ryzanstein.worker.agent.node import NodeAgent
from ryzanstein.worker.agent.tokenizing import encoded
from ryzanstein.worker.engine.memory.prefix import scope_root
from ryzanstein.worker.engine.messages import SubmitGroup
from ryzanstein.worker.telemetry.node_metrics import NodeEmbeddingMetrics
from ryzanstein.worker.text.embedding import EmbeddingModel
from ryzanstein.worker.text.tokenizer import TextModel

Context = ServicerContext[Any, Any]

MAX_AT_ONCE = 16


class NodeEmbeddingServicer(EmbeddingServiceServicer):
    """A thin adapter from gRPC to the vectors of the node's models."""

    def __init__(self, models: NodeModels, metrics: NodeEmbeddingMetrics) -> None:
        self._models, self._metrics = models, metrics

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        metadata = {key: str(value) for key, value in context.invocation_metadata() or ()}
        tenant = valid_tenant(metadata.get(TENANT_ID, ""), request.user)
        scope = cache_scope_from_wire(request.cache_scope)
        asked = replace(embed_from_wire(request), tenant=tenant, cache_scope=scope)
        node, remaining_s = self._models.of(asked.model).node, context.time_remaining()
        deadline = None if remaining_s is None else time.monotonic() + remaining_s
        with self._metrics.call():
            embedded = await NodeEmbedding(node, asked, deadline).run()
        self._metrics.inputs.inc(len(embedded))
        self._metrics.input_tokens.inc(sum(each.prompt_tokens for each in embedded))
        return embedded_to_wire(embedded, node.text_of(asked.model).name)


class NodeEmbedding:
    """One request for vectors on one model of this node. `deadline` is monotonic seconds."""

    def __init__(self, node: NodeAgent, asked: EmbeddingRequest, deadline: float | None) -> None:
        self._node, self._asked, self._deadline = node, asked, deadline
        self._text = node.text_of(asked.model)
        if self._text.embedding is None:
            raise no_embeddings(self._text.name)
        self._model: EmbeddingModel = self._text.embedding
        self._prompt = self._model.prompt(asked.prompt_name)
        if asked.dimensions is not None:
            self._model.check_cut(asked.dimensions)
        self._at_once = asyncio.Semaphore(MAX_AT_ONCE)

    async def run(self) -> list[Embedded]:
        """Returns the vectors in the order of the inputs. When one fails, the others are cancelled."""
        prompts: list[list[int]] = []
        for i, given in enumerate(self._asked.inputs):
            prompts.append(await self._tokens(given, i))
            await asyncio.sleep(0)  # short texts are tokenized in this loop, which also sends beats
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._embedded(token_ids)) for token_ids in prompts]
        except BaseExceptionGroup as failed:
            raise _first(failed) from None
        return [task.result() for task in tasks]

    async def _embedded(self, token_ids: list[int]) -> Embedded:
        async with self._at_once:
            raw = await self._node.submissions.vector(self._text, self._group(token_ids))
        return Embedded(finished(raw, self._model, self._asked), len(token_ids))

    def _group(self, token_ids: list[int]) -> SubmitGroup:
        return SubmitGroup(
            group=self._node.submissions.new_group(),
            prompt_ids=token_ids,
            sampling=SamplingParams(temperature=0, max_tokens=1, seed=0),
            max_tokens=1,
            stop_token_ids=[],
            generated=[[]],
            finished=[False],
            deadline=self._deadline,
            priority=self._asked.priority,
            tenant=self._asked.tenant,
            cache_root=scope_root(self._asked.cache_scope),
            pooling=self._model.pooling,
        )

    async def _tokens(self, given: EmbedInput, place: int) -> list[int]:
        match given:
            case TextPrompt(text):
                token_ids = await _encoded(self._text, self._model, self._prompt, text)
            case TokenPrompt(ids):
                token_ids = list(ids)
        if not token_ids:
            raise errors.invalid(f"inputs[{place}]", "must have at least one token")
        most = self._most_tokens()
        if len(token_ids) > most:
            violation = FieldViolation(f"inputs[{place}]", f"must have at most {most} tokens")
            raise replace(errors.context_too_long(len(token_ids), 0, most), violations=(violation,))
        wrong = next((each for each in token_ids if each >= self._text.vocab_size), None)
        if wrong is not None:
            raise errors.invalid(f"inputs[{place}]", f"each token id must be in [0, {self._text.vocab_size})", wrong)
        return token_ids

    def _most_tokens(self) -> int:
        form = self._node.host.announced
        served = self._text.context_length if form is None else form.context_length
        return min(served, self._model.max_tokens or served)


def finished(raw: bytes, model: EmbeddingModel, asked: EmbeddingRequest) -> array[float]:
    """Returns the vector of pooled numbers: cut to the dimensions that are asked for, then normalized."""
    numbers = np.frombuffer(raw, np.float32)
    if asked.dimensions is not None:
        if asked.dimensions > len(numbers):
            raise errors.invalid("dimensions", f"must be at most {len(numbers)}", asked.dimensions)
        numbers = numbers[: asked.dimensions]
    check_numbers(len(asked.inputs), len(numbers))
    if model.normalized:
        length = math.sqrt(math.fsum(number * number for number in numbers.tolist()))
        numbers = (numbers / max(length, 1e-12)).astype(np.float32)
    return array("f", numbers.tobytes())


async def _encoded(text_model: TextModel, model: EmbeddingModel, prompt: str, text: str) -> list[int]:
    """Returns the tokens of a text behind a prompt, without the space around it, as sentence-transformers does."""
    whole = (prompt + text).strip()
    whole = whole.lower() if model.lower else whole
    return await encoded(text_model.encode, whole, len(whole))


def _first(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the first error; one of the domain, if there is any."""
    known: Sequence[BaseException] = [each for each in failed.exceptions if isinstance(each, RyzansteinError)]
    return (known or failed.exceptions)[0]
