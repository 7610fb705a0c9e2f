"""Requests to a real cluster as benchmarks send them: open loop (they come whatever happens) or closed (one after another)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import grpc

from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub

WORDS = ["river", "stone", "moon", "house", "tree", "night", "cloud", "bread", "light", "water"]


@dataclass(slots=True)
class Sent:
    """What became of one request. Times are of `time.monotonic`; `refused` is the reason of its error, empty when it ended."""

    tenant: str
    came: float
    first: float = 0.0
    ended: float = 0.0
    refused: str = ""
    retry_after_s: float | None = None
    tokens: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.first - self.came


class Client:
    """Streams completions of random prompts; keeps what became of each in `sent`."""

    def __init__(self, channel: grpc.aio.Channel, seed: int) -> None:
        self._stub = InferenceServiceStub(channel)
        self._random = random.Random(seed)
        self.sent: list[Sent] = []

    async def send(self, tenant: str = "", least_tokens: int = 16, most_tokens: int = 112) -> Sent:
        prompt = " ".join(self._random.choices(WORDS, k=self._random.randint(8, 24)))
        sampling = inference.SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=self._random.randint(least_tokens, most_tokens)
        )
        request = inference.StreamCompleteRequest(complete=inference.CompleteRequest(text=prompt, sampling=sampling))
        sent = Sent(tenant, time.monotonic())
        self.sent.append(sent)
        metadata = (("x-tenant-id", tenant),) if tenant else ()
        try:
            async for response in self._stub.StreamComplete(request, timeout=120, metadata=metadata):
                if num := len(response.event.delta.token_ids):
                    now = time.monotonic()
                    sent.first = sent.first or now
                    sent.tokens += [now] * num
        except grpc.aio.AioRpcError as failure:
            error = error_from_rpc(failure)
            sent.refused, sent.retry_after_s = error.reason, error.retry_after_s
        sent.ended = time.monotonic()
        return sent


async def closed_loop(one: Callable[[], Awaitable[object]], streams: int, seconds: float) -> None:
    """So many at a time, each followed by the next."""
    until = time.monotonic() + seconds

    async def stream() -> None:
        while time.monotonic() < until:
            await one()

    await asyncio.gather(*(stream() for _ in range(streams)))


async def open_loop(one: Callable[[], Awaitable[object]], rate: float, seconds: float, seed: int) -> None:
    """Poisson arrivals; returns when all have ended."""
    arrivals, tasks, at = random.Random(seed), [], time.monotonic()
    until = at + seconds
    while (at := at + arrivals.expovariate(rate)) < until:
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        tasks.append(asyncio.ensure_future(one()))
    await asyncio.gather(*tasks)


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
