from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from ryzanstein import errors
from ryzanstein.embeddings import Embedded, EmbeddingRequest
from ryzanstein.generation.prompts import ChatPrompt, Prompt, TextPrompt
from ryzanstein.generation.request import GenerationRequest
from ryzanstein.generation.tokens import (
    Delta,
    Finished,
    FinishReason,
    GenerationEvent,
    PromptScores,
    PromptToken,
    Started,
    Token,
    TokenLogprobs,
    TopLogprob,
    Usage,
)
from ryzanstein.router.access.authenticator import Anonymous
from ryzanstein.router.access.entrance import Entrance
from ryzanstein.router.faces.http.app import create_app
from ryzanstein.router.faces.http.gate import HttpLimits
from ryzanstein.router.faces.http.serving.connections import ConnectionBounds
from ryzanstein.router.faces.http.serving.server import HttpServer
from ryzanstein.router.nodes.calls.texts import Tokenized
from ryzanstein.router.nodes.table import ServedModel
from ryzanstein.router.telemetry import RouterTelemetry

MODEL = "echo"
CREATED = 1_700_000_000


@dataclass
class Generation:
    """One generation's tokens so far; readers wait on `moved`."""

    request: GenerationRequest
    tokens: list[list[Token]]
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    error: Exception | None = None
    moved: asyncio.Condition = field(default_factory=asyncio.Condition)
    task: asyncio.Task[None] | None = None


class EchoCore:
    """A `Core` in this process that answers with the prompt's own words, one token a word.

    `pause_at` holds every generation at a token until `resume` is set; `fail_at` ends it there with `error`.
    """

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []
        self.embedded: list[EmbeddingRequest] = []
        self.cancelled: list[str] = []
        self.readers = 0
        self.refusal: Exception | None = None
        self.fail_at: int | None = None
        self.error: Exception = errors.internal("the script says so")
        self.pause_at: int | None = None
        self.resume = asyncio.Event()
        self.served = [ServedModel(MODEL, 512, 2)]
        self._generations: dict[str, Generation] = {}

    @property
    def ready(self) -> bool:
        return bool(self.served)

    def models(self) -> list[ServedModel]:
        return self.served

    async def count_tokens(self, model: str, prompt: Prompt) -> int:
        return len(_words(prompt))

    async def tokenize(self, model: str, prompt: Prompt, *, special: bool = True, with_texts: bool = False) -> Tokenized:
        words = _words(prompt)
        return Tokenized([len(word) for word in words], words if with_texts else ())

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        return "".join(f"{token_id} " for token_id in token_ids)

    async def embed(self, request: EmbeddingRequest) -> list[Embedded]:
        if self.refusal is not None:
            raise self.refusal
        if request.model not in (MODEL, ""):
            raise errors.not_found("model", request.model)
        self.embedded.append(request)
        return [Embedded(array("f", [0.5, -0.25, float(i)]), len(_words(given))) for i, given in enumerate(request.inputs)]

    def model_of(self, name: str) -> str:
        return name or MODEL

    async def submit(self, request: GenerationRequest, *, resumable: bool = True) -> str:
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        if request.model not in (MODEL, ""):
            raise errors.not_found("model", request.model)
        generation = Generation(request, [[] for _ in range(request.sampling.n)])
        generation_id = f"g{len(self._generations)}"
        self._generations[generation_id] = generation
        generation.task = asyncio.create_task(self._live(generation))
        return generation_id

    async def follow(
        self,
        generation_id: str,
        from_index: Mapping[int, int] | None = None,
        owner_id: str = "",
        *,
        whole: bool = False,
        tenant: str = "",
    ) -> AsyncGenerator[GenerationEvent, None]:
        if generation_id not in self._generations:
            raise errors.not_found("generation", generation_id)
        generation = self._generations[generation_id]
        self.readers += 1
        try:
            await self._until(generation, lambda: generation.error or any(generation.tokens) or generation.reasons)
            if generation.error is not None and not any(generation.tokens):
                raise generation.error
            prompt_tokens = len(_words(generation.request.prompt))
            _check_position(generation, dict(from_index or {}))
            yield Started(generation_id, MODEL, "node-0", prompt_tokens, CREATED, generation.request.answer_form)
            if generation.request.sampling.prompt_logprobs is not None:
                yield PromptScores(0, _scores(generation.request))
            async for event in self._events(generation, dict(from_index or {}), prompt_tokens):
                yield event
        finally:
            self.readers -= 1

    async def leave(self, generation_id: str) -> None:
        await self.cancel(generation_id)

    async def cancel(self, generation_id: str, owner_id: str = "", *, tenant: str = "") -> None:
        generation = self._generations.get(generation_id)
        if generation is None or generation.task is None or generation.task.done():
            raise errors.not_found("generation", generation_id)
        self.cancelled.append(generation_id)
        generation.task.cancel()
        for choice in range(generation.request.sampling.n):
            generation.reasons.setdefault(choice, FinishReason.CANCELLED)
        await _notify(generation)

    async def close(self) -> None:
        tasks = [generation.task for generation in self._generations.values() if generation.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _events(self, generation: Generation, at: dict[int, int], prompt_tokens: int) -> AsyncIterator[GenerationEvent]:
        sent: set[int] = set()
        while True:
            for choice, tokens in enumerate(generation.tokens):
                first = at.get(choice, 0)
                if len(tokens) > first:
                    at[choice] = len(tokens)
                    yield Delta(choice, first, tuple(tokens[first:]), "node-1")
            for choice in sorted(generation.reasons.keys() - sent):
                if at.get(choice, 0) >= len(generation.tokens[choice]):
                    sent.add(choice)
                    completion = sum(map(len, generation.tokens))
                    yield Finished(choice, generation.reasons[choice], Usage(prompt_tokens, completion, 1))
            if len(sent) == len(generation.tokens):
                return
            if generation.error is not None:
                raise generation.error
            await self._until(
                generation,
                lambda: (
                    generation.error
                    or generation.reasons.keys() - sent
                    or any(len(tokens) > at.get(choice, 0) for choice, tokens in enumerate(generation.tokens))
                ),
            )

    async def _until(self, generation: Generation, condition: Callable[[], object]) -> None:
        async with generation.moved:
            await generation.moved.wait_for(lambda: bool(condition()))

    async def _live(self, generation: Generation) -> None:
        sampling = generation.request.sampling
        words = _words(generation.request.prompt)
        bound = len(words) if sampling.max_tokens is None else min(len(words), sampling.max_tokens)
        for index in range(bound):
            if index == self.pause_at:
                await self.resume.wait()
            if index == self.fail_at:
                generation.error = self.error
                break
            for tokens in generation.tokens:
                tokens.append(_token(index, words[index], sampling.logprobs))
            await _notify(generation)
            await asyncio.sleep(0)
        else:
            reason = FinishReason.STOP if bound == len(words) else FinishReason.LENGTH
            for choice in range(sampling.n):
                generation.reasons.setdefault(choice, reason)
                await _notify(generation)
        await _notify(generation)


def _scores(request: GenerationRequest) -> list[PromptToken]:
    """The prompt's words: the first has no log probability, the others are the likeliest but one."""
    words = _words(request.prompt)
    top = (TopLogprob(7, "likely", -0.25),)[: request.sampling.prompt_logprobs]
    return [PromptToken(i, word, None if not i else -1.5, top if i else ()) for i, word in enumerate(words)]


def _check_position(generation: Generation, at: dict[int, int]) -> None:
    for choice, index in at.items():
        if choice >= len(generation.tokens) or index > len(generation.tokens[choice]):
            raise errors.invalid("from_index", "no such index", index)


async def _notify(generation: Generation) -> None:
    async with generation.moved:
        generation.moved.notify_all()


def _words(prompt: Prompt) -> list[str]:
    if isinstance(prompt, ChatPrompt):
        return re.findall(r"\S+\s*", prompt.messages[-1].content)
    if isinstance(prompt, TextPrompt):
        return re.findall(r"\S+\s*", prompt.text)
    return [f"{token_id} " for token_id in prompt.token_ids]


def _token(index: int, text: str, logprobs: int | None) -> Token:
    if logprobs is None:
        return Token(index, text)
    top = (TopLogprob(index, text, -0.5), TopLogprob(index + 1, "alternative", float("-inf")))
    return Token(index, text, TokenLogprobs(-0.5, top[:logprobs]))


@dataclass
class Face:
    """The application behind a real server on loopback."""

    core: EchoCore
    telemetry: RouterTelemetry
    url: str

    def requests_with(self, code: int, route: str = "/v1/chat/completions") -> float:
        return self.telemetry.requests.labels("http", route, str(code))._value.get()


def open_door(telemetry: RouterTelemetry) -> Entrance:
    return Entrance(Anonymous(), telemetry.registry)


def open_app(core: EchoCore, *given: Any, **options: Any) -> FastAPI:
    """Returns the application of a router that lets everybody in."""
    telemetry = RouterTelemetry()
    return create_app(core, telemetry, open_door(telemetry), *given, **options)


@pytest.fixture
def make_core() -> Callable[[], EchoCore]:
    return EchoCore


@pytest.fixture
def limits() -> HttpLimits:
    return HttpLimits()


@pytest.fixture
async def face(limits: HttpLimits) -> AsyncIterator[Face]:
    core, telemetry = EchoCore(), RouterTelemetry()
    server = HttpServer(create_app(core, telemetry, open_door(telemetry), limits), "127.0.0.1", 0)
    await server.start()
    yield Face(core, telemetry, f"http://127.0.0.1:{server.port}")
    await core.close()
    await server.stop(1)


@pytest.fixture
async def http(face: Face) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=face.url, timeout=20, trust_env=False) as client:
        yield client


@pytest.fixture
async def client(face: Face) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{face.url}/v1", api_key="none", max_retries=0, timeout=20) as made:
        yield made


@pytest.fixture
def chat() -> Callable[..., dict[str, object]]:
    """A chat request's body."""

    def body(text: str = "one two three", **fields: object) -> dict[str, object]:
        return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}

    return body


@pytest.fixture
def eventually() -> Callable[..., object]:
    async def wait(condition: Callable[[], object], what: str) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert condition(), what

    return wait


class Served:
    """A server with raw connections to it."""

    def __init__(self, core: EchoCore, telemetry: RouterTelemetry, server: HttpServer) -> None:
        self.core, self.telemetry, self.server = core, telemetry, server

    async def connect(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        writer.write(data)
        return reader, writer

    async def say(self, data: bytes) -> bytes:
        """Everything that is answered until the connection is closed."""
        reader, writer = await self.connect(data)
        try:
            async with asyncio.timeout(20):
                return await reader.read()
        finally:
            writer.close()

    def refused(self, reason: str) -> float:
        return float(self.telemetry.http_refused.labels(reason)._value.get())


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Awaitable[Served]]]:
    """Starts servers with bounds of their own."""
    served: list[Served] = []

    async def start(bounds: ConnectionBounds | None = None, limits: HttpLimits | None = None) -> Served:
        core, telemetry = EchoCore(), RouterTelemetry()
        app = create_app(core, telemetry, open_door(telemetry), limits)
        server = HttpServer(app, "127.0.0.1", 0, bounds, lambda reason: telemetry.http_refused.labels(reason).inc())
        await server.start()
        served.append(Served(core, telemetry, server))
        return served[-1]

    yield start
    for one in served:
        await one.core.close()
        await one.server.stop(1)
