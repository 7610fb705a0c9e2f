"""One request of a client: it reads, loses its stream, comes back, gives up, or gets an error."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.lab.simulation.access.key_ring import metadata
from ryzanstein.lab.simulation.checks import BrokenPromise, Checks
from ryzanstein.lab.simulation.clients.questions import ClientQuestion
from ryzanstein.lab.simulation.cluster import Cluster
from ryzanstein.lab.simulation.planning.plan import FOREIGN_LACKS, ClientPlan
from ryzanstein.lab.simulation.scripted.answers import SeenAnswer
from ryzanstein.lab.simulation.strikes import JOURNAL, STORE
from ryzanstein.router.access.limits.usage import UsageCount
from ryzanstein.rpc.client import open_channel
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_AWAY_S = (0.05, 8.0)
_WINDOW_S = 25.0
_MANY_RETRIES = 30
# These do not end a generation: it is elsewhere, and the client retries.
_NOT_HERE = ("JOURNAL_UNAVAILABLE", "GENERATION_MOVED", "QUEUE_FULL")
_ODD_FOR_S = 5.0


@dataclass(slots=True)
class ClientTally:
    """How requests ended."""

    complete: int = 0
    tokens: int = 0
    by_outcome: dict[str, int] = field(default_factory=dict)

    def count(self, outcome: str) -> None:
        self.by_outcome[outcome] = self.by_outcome.get(outcome, 0) + 1


class Asking:
    """One request until its answer, its error or its end."""

    def __init__(
        self,
        question: ClientQuestion,
        plan: ClientPlan,
        cluster: Cluster,
        *,
        checks: Checks,
        tally: ClientTally,
        rng: random.Random,
    ) -> None:
        self.question, self.plan, self._rng = question, plan, rng
        self._cluster, self._checks, self._tally = cluster, checks, tally
        self.answer = SeenAnswer(question.sampling.n)
        self.began_at = self.ended_at = math.inf
        self._router = rng.randrange(len(self._cluster.routers))
        self._loop = asyncio.get_running_loop()
        self._asked_at = self._connected_at = self._loop.time()
        self._retry_reason = ""
        self._retries = self.sent = 0
        self._lost = False
        self._pause_s = _FIRST_PAUSE_S
        self._leaves_at = rng.randint(1, 200) if rng.random() < plan.leaves else None
        self._cancels_at = rng.randint(1, 200) if rng.random() < plan.cancels else None
        self._loses = rng.random() < plan.loses_stream
        self._loses_at = rng.choice((0, 0, rng.randint(1, 100))) if self._loses else None
        self._twin: Asking | None = None
        self._key = ""
        """The key of the last call."""
        self._pries = bool(cluster.plan.tenants) and random.Random(f"{question.key} pries").random() < 0.1

    def again(self, chance: float) -> Asking | None:
        """Returns the same request, to be sent to another router too; None for one whose client may abandon it."""
        if self._leaves_at is not None or self._cancels_at is not None or len(self._cluster.routers) < 2:
            return None
        rng = random.Random(chance)
        plan = replace(self.plan, loses_stream=0.0, leaves=0.0, cancels=0.0)
        other = Asking(self.question, plan, self._cluster, checks=self._checks, tally=self._tally, rng=rng)
        other._router = (self._router + 1) % len(self._cluster.routers)
        self._twin, other._twin = other, self
        return other

    async def run(self) -> str:
        """Runs the request and returns how it ended."""
        outcome = ""
        while not outcome:
            outcome = await self._once()
        self.ended_at = self._loop.time()
        for problem in self.answer.problems:
            self._checks.violated(BrokenPromise.INDEX, problem, key=self.question.key)
        if self._demanding:
            self._checks.check_engines(self.answer.node_ids, key=self.question.key)
        return outcome

    @property
    def _demanding(self) -> bool:
        """Whether engines of others do not support the request."""
        return bool(getattr(self.question.sampling, FOREIGN_LACKS))

    async def _once(self) -> str:
        """Reads one stream. Returns an empty string if another one is needed."""
        left_s = self.question.deadline - self._loop.time()
        if left_s <= 0:
            return "deadline"
        try:
            async with open_channel(self._cluster.routers[self._router].address) as channel:
                outcome = await self._read(InferenceServiceStub(channel), left_s)
        except grpc.aio.AioRpcError as failure:
            return await self._failed(failure)
        return outcome or await self._again(self._rng.uniform(*_AWAY_S), move=True)

    async def _read(self, stub: Any, left_s: float) -> str:
        """Reads until the stream ends or the client abandons it."""
        self._lost = False
        call = self._call(stub, left_s)
        async with contextlib.aclosing(self._events(call)) as events:
            async for event in events:
                self._connected_at = self._loop.time()
                self._checks.check_key(self._cluster.routers[self._router].name, self._key, asked=self.question.key)
                if self._pries:
                    self._pries = False
                    await self._pry(stub)
                self._retry_reason, self._retries, self._pause_s = "", 0, _FIRST_PAUSE_S
                self.answer.event(event, self._connected_at)
                self.began_at = min(self.began_at, self._connected_at)
                if (outcome := await self._had_enough(stub)) is not None:
                    call.cancel()
                    return outcome
        if not self.answer.complete:
            if not self._lost:
                self._checks.violated(BrokenPromise.LOST, "the stream ended before its answer", key=self.question.key)
            return ""
        cancelled = [choice for choice in self.answer.choices if choice.reason == pb.FINISH_REASON_CANCELLED]
        if cancelled:
            self._checks.violated(
                BrokenPromise.CANCELLED, "an answer that nobody cancelled was cancelled", key=self.question.key
            )
            return "cancelled"
        self._tally.complete += 1
        self._checks.used[self.answer.generation_id] = UsageCount(1, *self.answer.used)
        return "complete"

    async def _pry(self, stub: Any) -> None:
        """Tries to read the generation as another tenant."""
        if not (stranger := self._cluster.keys.stranger_to(self.plan.number)):
            return
        request = pb.AttachGenerationRequest(generation_id=self.answer.generation_id)
        call = stub.AttachGeneration(request, timeout=5.0, metadata=metadata(stranger))
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in call:
                self._checks.violated(BrokenPromise.ACCESS, "another tenant read the answer", key=self.question.key)
                call.cancel()
                return
        self._checks.reach("another tenant was refused")

    def _call(self, stub: Any, left_s: float) -> Any:
        self._key = self._cluster.keys.key_of(self.plan.number)
        if self.answer.generation_id:
            self.answer.reattached()
            request = pb.AttachGenerationRequest(generation_id=self.answer.generation_id, from_index=self.answer.from_index)
            return stub.AttachGeneration(request, timeout=left_s, metadata=metadata(self._key))
        self.sent += 1
        return stub.StreamChat(pb.StreamChatRequest(chat=self.question.chat()), timeout=left_s, metadata=metadata(self._key))

    async def _events(self, call: Any) -> AsyncGenerator[pb.GenerationEvent, None]:
        lost = self._loses_at == 0 and not self.answer.generation_id
        if lost:
            # The connection breaks before anything arrives.
            self._loses_at, self._lost = None, True
            await asyncio.sleep(self._rng.uniform(0.001, 0.3))
            call.cancel()
            return
        async for response in call:
            yield response.event

    async def _had_enough(self, stub: Any) -> str | None:
        """Returns how the client abandons the stream, or None if it reads on."""
        seen = self.answer.num_tokens
        if self._leaves_at is not None and seen >= self._leaves_at:
            return "left"
        if self._cancels_at is not None and seen >= self._cancels_at:
            with contextlib.suppress(grpc.aio.AioRpcError):
                request = pb.CancelGenerationRequest(generation_id=self.answer.generation_id)
                await stub.CancelGeneration(request, timeout=5.0, metadata=metadata(self._key))
            return "cancelled"
        if self._loses_at is not None and seen >= self._loses_at:
            self._loses_at = None
            return ""
        return None

    async def _failed(self, failure: grpc.aio.AioRpcError) -> str:
        if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return "deadline"
        error = error_from_rpc(failure)
        now = self._loop.time()
        if "DEADLINE" in error.reason:
            if error.retry_after_s is None and now < self.question.deadline - 1.0:
                self._checks.violated(BrokenPromise.GAVE_UP, f"{error.reason} before the deadline", key=self.question.key)
            return "deadline"
        if error.reason == failure.code().name and failure.code() in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.CANCELLED,
        ):
            return await self._again(self._pause_s, move=True)
        self._cluster.record.say(
            "refused", key=self.question.key, reason=error.reason, retry_after_s=error.retry_after_s, message=error.message,
            tokens=self.answer.num_tokens, router=self._router,
        )  # fmt: skip
        if error.code is Code.UNAUTHENTICATED and self._cluster.plan.tenants:
            return await self._key_refused(error)
        return await self._refused(error)

    @property
    def _num_tokens(self) -> int:
        """Returns how many tokens a node's context must hold for this question."""
        return len(self.question.prompt_ids()) + (self.question.sampling.max_tokens or 0)

    @property
    def _progress_at(self) -> float:
        """Returns when the generation last moved, as far as this client knows: at the latest when it was first asked for."""
        if self.answer.progress_at or self._twin is None:
            return self.answer.progress_at or self._asked_at
        return min(self._asked_at, self._twin._asked_at)

    async def _refused(self, error: RyzansteinError) -> str:
        now, key = self._loop.time(), self.question.key
        if error.reason == "GENERATION_NOT_FOUND":
            return await self._not_found()
        if error.reason == "JOURNAL_UNAVAILABLE" and not self._checks.is_struck(JOURNAL, _ODD_FOR_S):
            self._checks.violated(BrokenPromise.RETRY, "JOURNAL_UNAVAILABLE while every disk works", key=key)
        not_here = error.retry_after_s is not None and error.reason in _NOT_HERE
        ended = self.answer.generation_id or error.reason in ("RANK_LOST", "RANK_STALLED", "LINK_DOWN")
        if ended and not not_here:
            self._checks.gave_up(
                error, self._progress_at, key=key, model=self.question.model, num_tokens=self._num_tokens,
                foreign=not self._demanding,
            )  # fmt: skip
        if error.retry_after_s is not None:
            self._retry_reason = error.reason
            self._retries += 1
            serves = self._checks.somebody_serves(self.question.model, foreign=not self._demanding)
            if error.code is not Code.RESOURCE_EXHAUSTED and self._retries > _MANY_RETRIES and serves:
                self._checks.violated(BrokenPromise.RETRY, f"{error.reason} asked {self._retries} times for a retry", key=key)
                return "gave up"
            return await self._again(error.retry_after_s, move=False)
        if outcome := self._intended(error):
            return outcome
        self._checks.violated(BrokenPromise.BLAMED, f"{error.reason}: {error.message}", key=key, at=round(now, 3))
        return error.reason.lower()

    def _intended(self, error: RyzansteinError) -> str:
        """Returns how a request ends with an error that is no mistake of the services; empty for any other error."""
        model = self.question.model
        if error.reason == "SESSION_FULL":
            return "session_full"
        if error.reason == "ENGINE_LACKS" and self._demanding and not self._checks.somebody_serves(model, foreign=False):
            self._checks.reach("refused by the name of a field")
            return "unsupported"
        if error.reason == "CONTEXT_TOO_LONG" and self._demanding and self._num_tokens > self._checks.own_context(model):
            return "too_long"
        if error.code is Code.INTERNAL and self._checks.is_struck(STORE, _ODD_FOR_S):
            return "internal"  # the store raised an unexpected exception
        return ""

    async def _key_refused(self, error: RyzansteinError) -> str:
        """Ends with the key that the answer began with. A router that was just away may not know a new key yet."""
        if error.reason == "KEY_REVOKED":
            if not self._cluster.keys.revoked_at:
                self._checks.violated(BrokenPromise.ACCESS, "a key is called revoked, and none was", key=self.question.key)
            self._checks.reach("ended with its key")
            return "revoked"
        self._retries += 1
        if error.reason != "KEY_INVALID" or self._retries > _MANY_RETRIES:
            self._checks.violated(BrokenPromise.ACCESS, f"{error.reason} for a valid key", key=self.question.key)
            return "refused"
        return await self._again(1.0, move=False)

    async def _not_found(self) -> str:
        """Checks that a generation is found within its window, on any router."""
        away_s = self._loop.time() - self._connected_at
        if self._retry_reason:
            self._checks.violated(
                BrokenPromise.RETRY, f"not found after {self._retry_reason} asked for a retry", key=self.question.key
            )
        elif away_s < _WINDOW_S and self._cluster.plan.session_store != "memory":
            self._checks.violated(BrokenPromise.LOST, f"not found {away_s:.1f} s after it was read", key=self.question.key)
        return "not_found"

    async def _again(self, pause_s: float, *, move: bool) -> str:
        """Waits, then lets the client retry, at another router if the last one seems to be gone."""
        await asyncio.sleep(pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        if move:
            self._router = (self._router + 1) % len(self._cluster.routers)
        if not self.answer.generation_id and not self.plan.resubmits and move:
            return "left"
        return ""
