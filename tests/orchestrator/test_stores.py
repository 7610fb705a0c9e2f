"""The store in Redis does what the one in SQLite does, and refuses what an earlier leader writes."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from operator import methodcaller

import pytest
from structlog.testing import capture_logs

from ryzanstein.adapters import DeployedAdapter
from ryzanstein.auth.audit.audit_record import AuditRecord
from ryzanstein.cluster import Deployment, Node, RolloutLimits
from ryzanstein.errors import RyzansteinError
from ryzanstein.lab.simulation.leaders.scripts import SCRIPTS
from ryzanstein.orchestrator.config import OrchestratorSettings
from ryzanstein.orchestrator.deploying.model_deployments import DeployOptions
from ryzanstein.orchestrator.leading.providers import redis_lease
from ryzanstein.orchestrator.opening import leadership_of, opened_store
from ryzanstein.orchestrator.state import redis_store
from ryzanstein.orchestrator.state.audit_table import AuditQuery
from ryzanstein.orchestrator.state.redis_store import RedisStore
from ryzanstein.orchestrator.state.store import Store
from ryzanstein.orchestrator.state.stored import StoredHalt, StoredMembership, StoredRefusal, StoreError, read_state
from ryzanstein.process.background import STOP
from ryzanstein.storage.redis_client import redis_client

NAMES = ["a", "b", "c/d", "\u00fc \N{SNOWMAN}", "e" * 200]


def record(rng: random.Random, number: int) -> AuditRecord:
    facts = rng.choice([None, {"revision": 2**60, "path": "/m", "idle_unload_s": 0.1, "pinned": True, "none": None}])
    name = rng.choice(["DeployModel", "DrainNode"])
    return AuditRecord(f"id-{number}", rng.random() * 1e9, "ada", "10.0.0.1", name, rng.choice(NAMES), "r", before=facts)


class Changes:
    """Random changes, the same for each store."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"stores {seed}")
        self.acts: list[AuditRecord] = []

    def next(self):
        rng = self.rng
        name = rng.choice(NAMES)
        match rng.randrange(10):
            case 0 | 1:
                deployment = Deployment(name, f"/{rng.random()}", rng.randrange(9), rng.randrange(1, 2**60), rng.random() * 99)
                if rng.random() < 0.5:
                    share, allowed = rng.choice([None, 0.0, rng.random()]), rng.random() < 0.5
                    limits = RolloutLimits(share, None, rng.random() * 9, 0.5, allowed)
                    deployment = replace(
                        deployment, min_replicas=1, max_replicas=9, rollout=limits, earlier_path="/\u00fc", outage_revision=7
                    )
                change = methodcaller("put_deployment", deployment)
            case 2:
                change = methodcaller("remove_deployment", name)
            case 3:
                adapter = DeployedAdapter(name, "m", f"/{rng.random()}", rng.random() < 0.5, rng.randrange(1, 99))
                change = methodcaller("put_adapter", adapter)
            case 4:
                change = methodcaller("remove_adapter", name)
            case 5 | 6:
                members = frozenset(rng.sample(NAMES, rng.randrange(5)))
                wanted = StoredMembership(members, {each: str(rng.random()) for each in rng.sample(NAMES, rng.randrange(4))})
                change = methodcaller("save_membership", wanted)
            case 7:
                refused = [
                    StoredRefusal(each, rng.choice(NAMES), "i", rng.randrange(2**60), rng.random() * 600, "no \N{SNOWMAN}")
                    for each in rng.sample(NAMES, rng.randrange(4))
                ]
                change = methodcaller("save_refusals", refused)
            case 8:
                names = rng.sample(NAMES, rng.randrange(3))
                halts = [StoredHalt(each, rng.randrange(2**60), "\N{SNOWMAN}", rng.random() < 0.5) for each in names]
                change = methodcaller("save_halts", halts)
            case _:
                act = self._act()
                change = methodcaller("write", act)
        return change

    def _act(self) -> AuditRecord:
        rng = self.rng
        if self.acts and rng.random() < 0.5:
            after = rng.choice([None, {"drain_requested": True}])
            act = replace(rng.choice(self.acts), outcome="done", reason=rng.choice(["", "WHY"]), after=after)
        else:
            act = record(rng, len(self.acts))
            self.acts.append(act)
        return act


async def pages(store, query: AuditQuery):
    """The records of all pages, page by page. The numbers of rows are each store's own."""
    found = []
    while True:
        page = await store.audit(query)
        found.append(page.records)
        if not page.next:
            return found
        query = replace(query, before=page.next)


QUERIES = [AuditQuery(3), AuditQuery(100), AuditQuery(1, method="DrainNode"), AuditQuery(2, target_prefix="e")]


@pytest.mark.parametrize("seed", range(5))
async def test_both_stores_keep_the_same(start_redis, tmp_path, telemetry, seed):
    server, path = await start_redis(), tmp_path / "o.sqlite"
    sqlite = await Store.open(path, telemetry)
    redis = await RedisStore.open(redis_client(server.url), "t:", telemetry)
    assert [await each.next_epoch(4) for each in (sqlite, redis)] == [5, 5]
    changes = Changes(seed)
    for number in range(120):
        change = changes.next()
        for store in (sqlite, redis):
            await change(store)
        if number % 40 == 20:
            for store in (sqlite, redis):
                await store.close()
            sqlite = await Store.open(path, telemetry)
            redis = await RedisStore.open(redis_client(server.url), "t:", telemetry)
            epochs = [await each.next_epoch() for each in (sqlite, redis)]
            assert epochs[0] == epochs[1]
        if number % 10 == 0:
            assert await read_state(sqlite) == await read_state(redis)
            for query in QUERIES:
                assert await pages(sqlite, query) == await pages(redis, query)
    for store in (sqlite, redis):
        await store.close()


async def test_what_an_earlier_leader_writes_is_refused_whatever_it_is(start_redis, telemetry):
    server = await start_redis()
    old, new = [await RedisStore.open(redis_client(server.url), "t:", telemetry) for _ in range(2)]
    heard = []
    old.fenced = heard.append
    await old.begin(await old.next_epoch())
    await old.put_deployment(Deployment("m", "/m", 1, 1))
    await old.save_membership(StoredMembership(frozenset("ab"), {"a": "1"}))
    await new.begin(7)
    await new.put_deployment(Deployment("m", "/new", 1, 2))
    before, acts = await read_state(new), await new.audit(AuditQuery(9))
    for write in (
        old.put_deployment(Deployment("m", "/late", 1, 9)),
        old.remove_deployment("m"),
        old.put_adapter(DeployedAdapter("x", "m", "/x")),
        old.remove_adapter("x"),
        old.save_membership(StoredMembership(frozenset("c"))),
        old.save_refusals([StoredRefusal("a", "m", "i", 1, 9.0, "")]),
        old.save_halts([StoredHalt("m", 1, "")]),
        old.write(record(random.Random(0), 0)),
        old.begin(3),
    ):
        with pytest.raises(RyzansteinError) as refused:
            await write
        assert refused.value.reason == "NOT_LEADER"
    assert heard == [7] * 9
    assert (await read_state(new), await new.audit(AuditQuery(9))) == (before, acts)
    assert await old.next_epoch() == 8, "a new term of it"
    await old.put_deployment(Deployment("m", "/again", 1, 3))
    for each in (old, new):
        await each.close()


class Slow:
    """A client of which one script waits on its way to the server."""

    def __init__(self, client):
        self._client, self.hold = client, False
        self.arrives = asyncio.Event()

    def __getattr__(self, name):
        return getattr(self._client, name)

    def register_script(self, text):
        script = self._client.register_script(text)

        async def run(keys, args):
            if self.hold:
                self.hold = False
                await self.arrives.wait()
            return await script(keys, args)

        return run


async def test_a_write_that_arrives_after_a_later_one_of_the_same_leader_is_not_done(start_redis, telemetry):
    server = await start_redis()
    client = Slow(redis_client(server.url))
    store = await RedisStore.open(client, "t:", telemetry)
    await store.begin(await store.next_epoch())
    keys, args = [], []
    change = store._change

    async def lost(*sent):
        keys[:], args[:] = sent
        raise ConnectionError("the answer was lost")

    store._change = lost
    with pytest.raises(RyzansteinError) as failed:
        await store.remove_deployment("m")
    assert failed.value.reason == "STORE_UNAVAILABLE"
    store._change = change
    await store.put_deployment(Deployment("m", "/m", 1, 2))
    assert await change(keys, args) == -1, "the kernel sends it when its path is whole again"
    assert await store.deployments() == (Deployment("m", "/m", 1, 2),)
    await store.close()


@pytest.mark.parametrize("options", [{"reload": True}, {"rollback": True}], ids=str)
async def test_a_deployment_that_was_done_and_reported_as_refused_is_not_done_again_by_the_next_leader(
    start_redis, tmp_path, telemetry, options
):
    """The answer of a write is lost, another leader begins, and the client of Redis repeats the write, which is refused."""
    server = await start_redis()
    settings = OrchestratorSettings(database=tmp_path / "o", store="redis", redis_url=server.url, redis_prefix="t:")
    async with opened_store(settings, telemetry) as one, opened_store(settings, telemetry) as two:
        first = (await leadership_of(settings, one, telemetry)).control
        for directory in ("/m", "/new"):
            await first.deploy(Deployment("m", directory, 1))
        change = one._change

        async def repeated(keys, args):
            await change(keys, args)
            await two.begin(await two.next_epoch())
            return await change(keys, args)

        one._change = repeated
        asked, deployment = DeployOptions(**options, idempotency_key="one"), Deployment("m", "/new", 1)
        with pytest.raises(RyzansteinError) as refused:
            await first.deploy(deployment, asked)
        assert refused.value.reason == "NOT_LEADER"
        second = (await leadership_of(settings, two, telemetry)).control
        done = second.deployment("m")
        assert (done.revision, done.path) == (3, "/new" if "reload" in options else "/m")
        assert await second.deploy(deployment, asked) == done == second.deployment("m")
        assert (await second.deploy(deployment, replace(asked, idempotency_key="two"))).revision == 4
        for control in (first, second):
            await control.abandon()


async def test_of_two_writes_at_once_the_second_waits_and_nothing_of_it_is_forgotten(start_redis, telemetry):
    server = await start_redis()
    client = Slow(redis_client(server.url))
    store = await RedisStore.open(client, "t:", telemetry)
    await store.begin(await store.next_epoch())
    client.hold = True
    earlier = asyncio.create_task(store.save_membership(StoredMembership(frozenset("ab"))))
    await asyncio.sleep(0.05)
    later = asyncio.create_task(store.save_membership(StoredMembership(frozenset("ab"), {"a": "1"})))
    await asyncio.sleep(0.05)
    client.arrives.set()
    await asyncio.gather(earlier, later)
    await store.save_membership(StoredMembership(frozenset("ab")))
    assert await store._redis.hgetall("t:orchestrator:drains") == {}, "a drain that was withdrawn"
    await store.close()


async def test_the_simulator_does_what_the_scripts_do(start_redis, telemetry):
    server = await start_redis()
    client, data, rng = redis_client(server.url), {}, random.Random(7)
    scripts = {text: client.register_script(text) for text in SCRIPTS}
    base = ["epoch", "last-write"]
    for number in range(400):
        text, epoch = rng.choice(list(SCRIPTS)), rng.randint(1, 3 + number // 100)
        if text == redis_lease._REPLACE:
            keys, args = ["lease"], [rng.choice(["", *"123"]), rng.choice("123"), "h", "a:1", epoch]
        elif text == redis_store._NEXT_EPOCH:
            keys, args = base[:1], [0]
            if rng.random() < 0.9:
                continue
        elif text == redis_store._CHANGE:
            keys, args = [*base, "x", "y"], [epoch, rng.randint(number - 3, number)]
            for _ in range(2):
                removed, put = rng.sample("abc", rng.randrange(3)), rng.sample("abc", rng.randrange(3))
                args += [len(removed), *removed, len(put), *(word for name in put for word in (name, rng.random()))]
        else:
            keys, args = (
                [base[0], *("by-id", "acts", "outcomes", "ids", "last")],
                [epoch, rng.randrange(30), "f", rng.random(), 5],
            )
        done = await scripts[text](keys, args)
        assert SCRIPTS[text](data, keys, [str(each) for each in args]) == done, (text, keys, args)
    for key in await client.keys("*"):
        kept = await (client.hgetall(key) if await client.type(key) == "hash" else client.get(key))
        assert data.pop(key) == kept
    assert data == {}
    await client.aclose()


async def test_the_oldest_acts_give_way(start_redis, telemetry):
    server = await start_redis()
    store = RedisStore(redis_client(server.url), "t:", telemetry, most_acts=5)
    for number in range(12):
        await store.write(record(random.Random(0), number))
    page = await store.audit(AuditQuery(100))
    assert [each.id for each in page.records] == [f"id-{number}" for number in range(11, 6, -1)]
    assert {await store._redis.hlen(key) for key in store._audit_keys[:4]} == {5}
    await store.close()


async def test_a_redis_that_is_gone_is_unavailable_and_comes_back(start_redis, telemetry):
    server = await start_redis()
    store = await RedisStore.open(redis_client(server.url), "t:", telemetry)
    await store.begin(1)
    await store.put_deployment(Deployment("m", "/m", 1, 1))
    await server.kill()
    with pytest.raises(RyzansteinError) as failed:
        await store.put_deployment(Deployment("n", "/n", 1, 1))
    assert failed.value.reason == "STORE_UNAVAILABLE"
    with pytest.raises(StoreError, match="cannot reach"):
        await RedisStore.open(redis_client(server.url), "t:", telemetry)
    await server.start()
    await store.put_deployment(Deployment("n", "/n", 1, 1))
    assert [each.model for each in await store.deployments()] == ["m", "n"]
    await store.close()


async def test_what_a_newer_version_stores_besides_is_left_out(start_redis, telemetry):
    server = await start_redis()
    store = await RedisStore.open(redis_client(server.url), "t:", telemetry)
    row = '{"model": "m", "path": "/m", "replicas": 2, "revision": 3, "idle_unload_s": 0.0, "x": "red", "rollout": {"y": 1}}'
    await store._redis.hset("t:orchestrator:deployments", "m", row)
    assert await store.deployments() == (Deployment("m", "/m", 2, 3),)
    await store.close()


async def test_of_two_orchestrators_without_an_election_on_one_redis_the_earlier_serves_no_more(
    start_redis, tmp_path, telemetry
):
    server = await start_redis()
    settings = OrchestratorSettings(database=tmp_path / "o", store="redis", redis_url=server.url, redis_prefix="t:")
    async with opened_store(settings, telemetry) as one, opened_store(settings, telemetry) as two:
        first = await leadership_of(settings, one, telemetry)
        await first.control.deploy(Deployment("m", "/m", 1))
        second = await leadership_of(settings, two, telemetry)
        assert (second.control.leader.epoch, second.control.deployment("m").path) == (2, "/m")
        with pytest.raises(RyzansteinError) as refused:
            await first.control.deploy(Deployment("n", "/n", 1))
        assert refused.value.reason == "NOT_LEADER"
        with pytest.raises(RyzansteinError) as refused:
            first.control.register(Node("a", "a:1", "i"))
        assert refused.value.reason == "NOT_LEADER"
        await second.control.deploy(Deployment("o", "/o", 1))
        with capture_logs() as logs:
            telemetry.background.supervise("lead", first.run, STOP)
            with pytest.raises(RyzansteinError, match="another orchestrator writes to this one's store"):
                await telemetry.background.until(asyncio.Event().wait())
        assert [each["exc_info"] for each in logs if each["event"] == "background task ended"] == [None], "no trace"
        await first.control.abandon()
        await second.close()
