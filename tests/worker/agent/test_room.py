"""A node's bound on what is on its way to the engine holds also for prompts that were tokenized at the same time."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest

from ryzanstein.demo import MODEL_DIR
from ryzanstein.generation.prompts import TextPrompt
from ryzanstein.generation.request import Attempt, ChoiceProgress, GenerationRequest, SamplingParams
from ryzanstein.lab.simulation.ranks.ranks import RankProfile, SimulatedRanks
from ryzanstein.observe.tracing import Tracing
from ryzanstein.worker.agent import intake
from ryzanstein.worker.agent.model_host import ModelChoice
from ryzanstein.worker.agent.node import NodeAgent
from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.engine_choice import engines_of
from ryzanstein.worker.telemetry import WorkerTelemetry
from ryzanstein.worker.text.templates.renderer import LocalRenderer

AT_ONCE, CHOICES = 5, 8


async def test_long_prompts_that_come_at_once_are_bounded_as_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenize, together = intake.tokenize, threading.Barrier(AT_ONCE, timeout=30)

    async def slowly(*args: Any, **more: Any) -> intake.ReadPrompt:
        await asyncio.to_thread(together.wait)
        return await tokenize(*args, **more)

    monkeypatch.setattr(intake, "tokenize", slowly)
    settings = WorkerSettings(_env_file=None, max_waiting=16, max_sequences=1)  # type: ignore[call-arg]
    ranks = SimulatedRanks(random.Random(1), RankProfile(start_s=0.01))
    engines = engines_of(settings, new_server=ranks.new_server)
    node = NodeAgent(settings, WorkerTelemetry(), Tracing("worker"), LocalRenderer(), new_engines=engines)
    choice = ModelChoice.at(str(MODEL_DIR))
    await node.host.load(choice)
    await node.host.settled(choice)
    link, running = node.links.open("router-t"), []

    async def submit(handle: int) -> None:
        request = GenerationRequest("", TextPrompt("hello " * 1000), SamplingParams(n=CHOICES, max_tokens=1000))
        await node.submissions.submit(link, handle, Attempt(f"g{handle}", 1, request, (ChoiceProgress(),) * CHOICES))
        running.append(node.version.running.num_choices)

    await asyncio.gather(*(submit(handle) for handle in range(AT_ONCE)))
    assert max(running) == 4 * CHOICES, "of the 33 that a line of 16 allows"
    link.close()
    await node.host.unload()
