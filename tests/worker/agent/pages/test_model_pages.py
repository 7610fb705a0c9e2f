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
from ryzanstein.generation.prompts import TokenPrompt
from ryzanstein.generation.request import Attempt, ChoiceProgress, GenerationRequest, NodePlace, SamplingParams
from ryzanstein.worker.agent.pages.model_pages import ModelPages
from ryzanstein.worker.agent.pages.page import root_of
from ryzanstein.worker.agent.pages.store import PageScope, StoreFailed
from ryzanstein.worker.agent.pages.traffic import PageTraffic
from ryzanstein.worker.checkpoints.weight_files import stamp
from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.engine.messages import FindPages, ReturnChoice, StepEvents
from ryzanstein.worker.supervision.messages import PagesAnswer, RankReady
from ryzanstein.worker.telemetry import NO_STATS, WorkerTelemetry

BACKUP = NodePlace("b", "127.0.0.1:1")
READY = RankReady(0, 4096, 160, 16, 4, {}, page_bytes=4096, page_format="format", weights_stamp=stamp(MODEL_DIR))
GROUP: Any = SimpleNamespace(progress=list, send=lambda message: None)


def attempt(**given: Any) -> Attempt:
    own = {name: given.pop(name) for name in ("tenant", "cache_scope") if name in given}
    request = GenerationRequest("m", TokenPrompt((1,)), SamplingParams(seed=1), **own)
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
        await self.pages.known(10)
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


@pytest.mark.parametrize("apart", ["tenant", "cache_scope"])
async def test_conversations_of_two_tenants_with_the_same_key_are_two(apart: str) -> None:
    pages = await Pages().ready()
    names = {tenant: [tenant.encode() * 17] for tenant in "ab"}
    for group, tenant in enumerate(names):
        pages.follow(group, attempt(**{apart: tenant}), "m")
    sealed = list(enumerate(names.values()))
    pages.on_step(StepEvents(1, [], [], [], {}, [], [], NO_STATS, 0.1, sealed=sealed), NO_STATS)
    chains = [(chain.scope.name, chain.keys) for chain in pages._conversations.newest_first()]
    assert sorted(chains) == [(tenant if apart == "cache_scope" else "", keys) for tenant, keys in names.items()]


async def test_only_the_same_weights_format_and_scope_are_believed() -> None:
    it = Pages()
    pages = await it.ready()
    scope = pages.scope("m", "t")
    assert scope is not None
    assert await pages.checked("m", "t", scope.root) == (pages.mover, scope)
    other_format = await Pages().ready(msgspec.structs.replace(READY, page_format="other"))
    foreign = other_format.scope("m", "t")
    assert foreign is not None
    for name, root in (("t", foreign.root), ("u", scope.root)):
        with pytest.raises(RyzansteinError) as refusal:
            await pages.checked("m", name, root)
        assert refusal.value.reason == "FOREIGN_PAGES"
    assert it.value("pages_refused_total", cause="foreign") == 2
    assert (await Pages().ready()).scope("another name", "t") == replace(scope, model="another name")


async def test_the_scope_and_not_the_tenant_says_whose_pages_are_whose(tmp_path) -> None:
    def scope_of(pages: ModelPages, cache_scope: str, tenant: str) -> PageScope:
        scope = pages.scope("m", cache_scope, tenant)
        assert scope is not None
        return scope

    pages = await Pages(kv_disk_bytes=2**20, kv_disk_dir=tmp_path).ready()
    assert scope_of(pages, "s", "a") == scope_of(pages, "s", "b")
    assert scope_of(pages, "", "a").root == scope_of(pages, "", "b").root != scope_of(pages, "s", "a").root
    earlier = {tenant: root_of(pages.weights_digest, "format", tenant) for tenant in ("", "a")}
    assert scope_of(pages, "", "a").root == earlier[""]
    assert scope_of(pages, "", "a").earlier == earlier["a"], "where the version before wrote"
    assert {scope_of(pages, *whose).earlier for whose in (("", ""), ("s", "a"))} == {b""}
    assert scope_of(await Pages().ready(), "", "a").earlier == b"", "there is no disk to read from"


async def test_a_node_without_replication_and_one_without_ranks_say_so() -> None:
    with pytest.raises(RyzansteinError) as refusal:
        await (await Pages(kv_replication="none").ready()).checked("m", "", bytes(16))
    assert refusal.value.reason == "PAGES_OFF"
    pages = await Pages().ready()
    pages.on_gone()
    assert not pages.follow(1, attempt(), "m")
    with pytest.raises(RyzansteinError) as refusal:
        await pages.checked("m", "", bytes(16))
    assert refusal.value.reason == "NODE_NOT_READY"


class Digest:
    """Stands for the reading of weights: it takes until `ends` is set, or it is stopped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.ends, self.ended = threading.Event(), threading.Event(), threading.Event()
        monkeypatch.setattr("ryzanstein.worker.agent.pages.weights.weights_digest", self._read)

    def _read(self, model: Any, loaded: str, stopped: Any) -> bytes:
        self.began.set()
        try:
            while not self.ends.is_set():
                if stopped():
                    raise OSError("stopped")
                time.sleep(0.01)
        finally:
            self.ended.set()
        return bytes(32)


async def test_weights_that_are_being_read_do_not_delay_the_end_of_ranks_or_process(monkeypatch) -> None:
    it = Pages(kv_host_bytes=2**20)
    for end in (it.pages.on_gone, it.telemetry.background.close):
        digest = Digest(monkeypatch)
        it.pages.on_ready(GROUP, [READY], MODEL_DIR)
        assert await asyncio.to_thread(digest.began.wait, 5), "a tier needs it at once"
        if (closing := end()) is not None:
            await closing
        assert await asyncio.to_thread(digest.ended.wait, 5)


async def test_a_node_without_neighbours_does_not_read_its_weights(monkeypatch) -> None:
    digest, it = Digest(monkeypatch), Pages()
    it.pages.on_ready(GROUP, [READY], MODEL_DIR)
    assert not it.pages.follow(1, attempt(backup=None), "m")
    await it.pages.restore(attempt(backup=None), range(1000), "m")
    await it.pages.hand_over()
    assert not digest.began.is_set()
    assert it.pages.follow(1, attempt(), "m")
    assert await asyncio.to_thread(digest.began.wait, 5)
    digest.ends.set()


async def test_pages_that_become_full_before_the_weights_are_known_are_sent_afterwards(monkeypatch) -> None:
    digest, it = Digest(monkeypatch), Pages()
    it.pages.on_ready(GROUP, [READY], MODEL_DIR)
    assert it.pages.follow(1, attempt(), "m")
    names = [bytes([i]) * 17 for i in range(5)]
    for sealed in (names[:3], names[3:]):
        it.pages.on_step(StepEvents(1, [], [], [], {}, [], [], NO_STATS, 0.1, sealed=[(1, list(sealed))]), NO_STATS)
    assert it.value("pages_queued") == 0
    digest.ends.set()
    await it.pages.known(5)
    assert it.value("pages_queued") == 5
    assert [chain.keys for chain in it.pages._conversations.newest_first()] == [names]


async def test_too_many_pages_do_not_wait_for_the_weights(monkeypatch) -> None:
    digest, it = Digest(monkeypatch), Pages()
    it.pages.on_ready(GROUP, [READY], MODEL_DIR)
    for group in range(3):
        it.pages.follow(group, attempt(), "m")
        names = [group.to_bytes(8) + i.to_bytes(9) for i in range(7_000)]
        it.pages.on_step(StepEvents(1, [], [], [], {}, [], [], NO_STATS, 0.1, sealed=[(group, names)]), NO_STATS)
    assert it.value("pages_dropped_total", cause="queue_full") == 7_000
    digest.ends.set()
    await it.pages.known(5)
    assert it.value("pages_queued") == 14_000


async def test_another_node_waits_a_moment_for_the_weights(monkeypatch) -> None:
    digest, it = Digest(monkeypatch), Pages()
    it.pages.on_ready(GROUP, [READY], MODEL_DIR)
    asking = asyncio.ensure_future(it.pages.checked("m", "", root_of(bytes(32), "format", "")))
    assert await asyncio.to_thread(digest.began.wait, 5)
    assert not asking.done()
    digest.ends.set()
    assert (await asking)[0] is it.pages.mover


async def test_ranks_that_loaded_before_the_files_changed_move_no_pages(tmp_path) -> None:
    it, copy = Pages(), tmp_path / "copy"
    shutil.copytree(MODEL_DIR, copy)
    loaded = stamp(copy)
    config = copy / "config.json"
    config.write_text(config.read_text() + " ")
    it.pages.on_ready(GROUP, [msgspec.structs.replace(READY, weights_stamp=loaded)], copy)
    await it.pages.known(10)
    assert it.pages.scope("m", "") is None
    assert not it.pages.follow(1, attempt(), "m")
    assert not it.pages.may_restore(attempt(previous=BACKUP))
    it.pages.on_ready(GROUP, [msgspec.structs.replace(READY, weights_stamp=stamp(copy))], copy)
    await it.pages.known(10)
    assert it.pages.scope("m", "") is not None, "restarted ranks have loaded the new files"


async def test_a_later_turn_waits_for_the_weights_of_a_node_that_has_just_started(monkeypatch) -> None:
    digest, it, asked = Digest(monkeypatch), Pages(), list[Any]()

    def send(message: Any) -> None:
        asked.append(message)
        it.pages.on_answer(PagesAnswer(message.number, 0))

    it.pages.on_ready(SimpleNamespace(progress=list, send=send), [READY], MODEL_DIR)  # type: ignore[arg-type]
    restoring = asyncio.ensure_future(it.pages.restore(attempt(previous=BACKUP), range(1000), "m"))
    assert await asyncio.to_thread(digest.began.wait, 5)
    assert not restoring.done()
    assert asked == []
    digest.ends.set()
    await restoring
    assert len(asked[0].names) == 999 // 16


async def test_a_paused_choice_runs_on_whether_or_not_its_pages_came(monkeypatch) -> None:
    it, sent = Pages(kv_host_bytes=2**20), list[Any]()

    def send(message: Any) -> None:
        sent.append(message)
        if isinstance(message, FindPages):
            it.pages.on_answer(PagesAnswer(message.number, 0, list(range(len(message.names)))))

    it.pages.on_ready(SimpleNamespace(progress=list, send=send), [READY], MODEL_DIR)  # type: ignore[arg-type]
    await it.pages.known(10)
    assert it.pages.parks
    it.pages.follow(1, attempt(), "m")
    keys = [bytes([i]) * 16 for i in range(20)]
    events = StepEvents(1, [], [], [], {}, [], [], NO_STATS, 0.1, returning=[(1, 0, keys), (2, 3, keys)])
    it.pages.on_step(events, NO_STATS)
    await asyncio.wait([task for task in asyncio.all_tasks() if task.get_name() == "pages_return"], timeout=5)
    returned = [message for message in sent if isinstance(message, ReturnChoice)]
    assert {(message.group, message.choice) for message in returned} == {(1, 0), (2, 3)}
    assert it.value("paused_choices_resumed_total", by="computing") == 2, "the tier has nothing, and nobody knows group 2"
    assert any(isinstance(message, FindPages) for message in sent)


class Backup:
    """The outboxes' stores of several nodes: what each was sent, and how often each was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: dict[str, list[str]]) -> None:
        self.fails, self.asked = fails, list[str]()
        monkeypatch.setattr(
            "ryzanstein.worker.agent.pages.model_pages.NodeStore", lambda address, *_, **__: Sent(self, address)
        )
        monkeypatch.setattr("ryzanstein.worker.agent.pages.handing_over._RECONNECT_S", 0.05)


class Sent:
    """The store of one node. It has every page already, so that nothing is sent."""

    def __init__(self, backup: Backup, address: str) -> None:
        self.backup, self.address = backup, address

    async def missing(self, scope: Any, keys: Any) -> list[int]:
        self.backup.asked.append(self.address)
        await asyncio.sleep(0.05)
        if causes := self.backup.fails.get(self.address):
            raise StoreFailed(causes.pop(0), 2.0)
        return []


async def test_a_drain_hands_over_to_several_nodes_at_once_and_tries_one_that_restarted_again(monkeypatch) -> None:
    backup = Backup(monkeypatch, {"b:1": ["unavailable"], "c:1": ["draining", "draining"], "d:1": ["unavailable"] * 9})
    it = Pages()
    pages = await it.ready()
    sealed = []
    for group, name in enumerate("abcd" * 2):
        pages.follow(group, attempt(backup=NodePlace(name, f"{name}:1"), conversation=bytes([group])), "m")
        sealed.append((group, [bytes([group]) * 17]))
    events = StepEvents(1, [], [], [], {}, [], [], NO_STATS, 0.1, sealed=sealed)
    for outbox in pages._outboxes.values():
        outbox._rests_until = time.monotonic() + 60  # nothing is sent before the drain
        outbox.failure = "unavailable"
    pages.on_step(events, NO_STATS)
    assert backup.asked == []
    began = time.monotonic()
    await pages.hand_over()
    assert time.monotonic() - began < 1.0
    counts = {name: backup.asked.count(f"{name}:1") for name in "abcd"}
    assert counts == {"a": 2, "b": 1, "c": 1, "d": 1}, "each had failed before: one more try each, and no chain after a failure"
