"""Whose pages go where, by the policy; and whose are believed."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ryzanstein.demo import MODEL_DIR
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation import Attempt, ChoiceProgress, GenerationRequest, NodePlace, SamplingParams, TokenPrompt
from ryzanstein.worker.agent.pages.model_pages import ModelPages
from ryzanstein.worker.agent.pages.traffic import PageTraffic
from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.engine.messages import StepEvents
from ryzanstein.worker.engines.messages import RankReady
from ryzanstein.worker.telemetry import NO_STATS, WorkerTelemetry

BACKUP = NodePlace("b", "127.0.0.1:1")
READY = RankReady(0, 4096, 160, 16, 4, {}, page_bytes=4096, page_format="format")
GROUP: Any = SimpleNamespace(progress=list, send=lambda message: None)


def attempt(**given: Any) -> Attempt:
    request = GenerationRequest("m", TokenPrompt((1,)), SamplingParams(seed=1), tenant=given.pop("tenant", ""))
    return Attempt("g", 0, request, (ChoiceProgress(),), **{"backup": BACKUP, "conversation": b"c", **given})


class Pages:
    """The pages of a model that is ready."""

    def __init__(self, **settings: Any) -> None:
        self.settings = WorkerSettings(_env_file=None, **settings)
        self.telemetry = WorkerTelemetry()
        traffic = PageTraffic(self.settings, self.telemetry.pages)
        self.pages = ModelPages(self.settings, self.telemetry, traffic, lambda: False)

    async def ready(self, answer: RankReady = READY) -> ModelPages:
        self.pages.on_ready(GROUP, [answer], MODEL_DIR)
        async with asyncio.timeout(10):
            while self.pages.on and self.pages.scope("m", "") is None:  # noqa: ASYNC110 (a digest tells nobody)
                await asyncio.sleep(0.01)
        return self.pages

    def value(self, name: str, **labels: str) -> float:
        return self.telemetry.registry.get_sample_value(f"ryzanstein_worker_{name}", labels) or 0.0


@pytest.mark.parametrize(
    ("policy", "conversations", "others"), [("none", False, False), ("sessions", True, False), ("all", True, True)]
)
async def test_the_policy_says_whose_pages_are_reported(policy, conversations, others) -> None:
    pages = await Pages(kv_replication=policy).ready()
    assert pages.follow(1, attempt(), "m") == conversations
    assert pages.follow(2, attempt(conversation=b""), "m") == others
    assert not pages.follow(3, attempt(backup=None), "m"), "an older router, or no other node"


async def test_a_tier_takes_the_pages_of_conversations_without_any_replication(tmp_path) -> None:
    pages = await Pages(kv_replication="none", kv_host_bytes=2**20).ready()
    assert pages.follow(1, attempt(backup=None), "m")
    assert not pages.follow(2, attempt(conversation=b""), "m")
    assert pages.may_restore(attempt())
    assert not pages.may_restore(attempt(conversation=b""))


async def test_full_pages_are_queued_and_those_of_unknown_groups_are_not() -> None:
    it = Pages()
    pages = await it.ready()
    pages.follow(1, attempt(), "m")
    names = [bytes([i]) * 17 for i in range(3)]
    pages.on_step(StepEvents(1, [], [], [], {}, [], [], NO_STATS, 0.1, sealed=[(1, names), (2, names)]), NO_STATS)
    assert it.value("pages_queued") == 3


async def test_conversations_of_two_tenants_with_the_same_key_are_two() -> None:
    pages = await Pages().ready()
    names = {tenant: [tenant.encode() * 17] for tenant in "ab"}
    for group, tenant in enumerate(names):
        pages.follow(group, attempt(tenant=tenant), "m")
    sealed = list(enumerate(names.values()))
    pages.on_step(StepEvents(1, [], [], [], {}, [], [], NO_STATS, 0.1, sealed=sealed), NO_STATS)
    chains = {chain.scope.tenant: chain.keys for chain in pages._conversations.newest_first()}
    assert chains == names


async def test_only_the_same_weights_format_and_tenant_are_believed() -> None:
    it = Pages()
    pages = await it.ready()
    scope = pages.scope("m", "t")
    assert scope is not None
    assert pages.checked("m", "t", scope.root) == (pages.mover, scope)
    other_format = await Pages().ready(RankReady(0, 4096, 160, 16, 4, {}, page_bytes=4096, page_format="other"))
    foreign = other_format.scope("m", "t")
    assert foreign is not None
    for tenant, root in (("t", foreign.root), ("u", scope.root)):
        with pytest.raises(RyzansteinError) as refusal:
            pages.checked("m", tenant, root)
        assert refusal.value.reason == "FOREIGN_PAGES"
    assert it.value("pages_refused_total", cause="foreign") == 2
    assert (await Pages().ready()).scope("another name", "t") == replace(scope, model="another name")


async def test_a_node_without_replication_and_one_without_ranks_say_so() -> None:
    with pytest.raises(RyzansteinError) as refusal:
        (await Pages(kv_replication="none").ready()).checked("m", "", bytes(16))
    assert refusal.value.reason == "PAGES_OFF"
    pages = await Pages().ready()
    pages.on_gone()
    assert not pages.follow(1, attempt(), "m")
    with pytest.raises(RyzansteinError) as refusal:
        pages.checked("m", "", bytes(16))
    assert refusal.value.reason == "NODE_NOT_READY"


async def test_weights_that_are_being_read_do_not_delay_the_end_of_ranks_or_process(monkeypatch) -> None:
    began, ended = threading.Event(), threading.Event()

    def read(model: Any, loaded_s: float, stopped: Any) -> bytes:
        began.set()
        while not stopped():
            time.sleep(0.01)
        ended.set()
        raise OSError

    monkeypatch.setattr("ryzanstein.worker.agent.pages.model_pages.weights_digest", read)
    it = Pages()
    for end in (it.pages.on_gone, it.telemetry.background.close):
        began.clear()
        ended.clear()
        it.pages.on_ready(GROUP, [READY], MODEL_DIR)
        assert await asyncio.to_thread(began.wait, 5)
        if (closing := end()) is not None:
            await closing
        assert await asyncio.to_thread(ended.wait, 5)


async def test_ranks_that_loaded_before_the_files_changed_move_no_pages(tmp_path) -> None:
    it, copy = Pages(), tmp_path / "copy"
    shutil.copytree(MODEL_DIR, copy)
    await asyncio.sleep(0.1)
    config = copy / "config.json"
    config.write_text(config.read_text() + " ")
    it.pages.on_ready(GROUP, [msgspec.structs.replace(READY, startup_phases={"load": 0.05, "warm_up": 0.04})], copy)
    assert it.pages._identifying is not None
    await it.pages._identifying
    assert it.pages.scope("m", "") is None
    await asyncio.sleep(0.1)
    it.pages.on_ready(GROUP, [msgspec.structs.replace(READY, startup_phases={"load": 0.01})], copy)
    await it.pages._identifying
    assert it.pages.scope("m", "") is not None, "restarted ranks have loaded the new files"
