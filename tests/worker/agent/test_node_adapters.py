"""The adapters of an agent, with real files: what routers are told, and what becomes of files that change."""

from __future__ import annotations

import asyncio
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ryzanstein.adapters import AdapterReport
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.request import AdapterRef
from ryzanstein.worker.adapters.packing import open_packed
from ryzanstein.worker.agent.adapters import registry
from ryzanstein.worker.agent.adapters.files import AdaptedModel
from ryzanstein.worker.agent.adapters.node_adapters import NodeAdapters, WantedAdapter

WEIGHT = "model.layers.0.self_attn.q_proj"
HOSTILE = [
    "../../../etc/passwd",
    "/",
    "a/b",
    "..",
    "😀" * 128,
    "名" * 128,
    "-rf",
    "%s%n",
    "demo\u202eomed",
    "a b",
    "NAME=DIR,x",
]


def written(folder: Path, seed: int, rank: int = 2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    prefix = f"base_model.model.{WEIGHT}"
    tensors = {
        f"{prefix}.lora_A.weight": random.normal(size=(rank, 8)).astype(np.float32),
        f"{prefix}.lora_B.weight": random.normal(size=(12, rank)).astype(np.float32),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Node:
    """The adapters of a model, and all that routers were told."""

    def __init__(self, max_bytes: int = 2**20) -> None:
        self.told: list[AdapterReport] = []
        self.removed: list[bytes] = []
        self.resident: set[bytes] = set()
        self.adapters = NodeAdapters(
            self.resident.__contains__, self.told.append, self.removed.append, able=True, max_bytes=max_bytes
        )
        self.adapters.ready(AdaptedModel(Path("/nowhere"), {WEIGHT: (8, 12)}))

    @property
    def names(self) -> list[str]:
        return [each.ref.name for each in self.adapters.report().adapters]

    async def add(self, name: str, path: Path) -> AdapterRef:
        return (await self.adapters.add(name, path)).ref

    async def packed(self, name: str) -> list[str]:
        """The weights of an adapter in the memory that ranks are told of."""
        adapter = self.adapters.registry.get(name)
        assert adapter is not None
        fd = await self.adapters.files.pack(adapter)
        try:
            assert os.fstat(fd).st_size <= adapter.num_bytes
            return list(open_packed(Path(f"/proc/self/fd/{fd}")))
        finally:
            os.close(fd)

    async def follow(self, wanted: dict[str, WantedAdapter], until: Callable[[], bool]) -> None:
        """Registers what is deployed; returns when `until` holds."""
        running = asyncio.create_task(self.adapters.run())
        self.adapters.follow(wanted, (b"1", "m"))
        await self.holds(until)
        running.cancel()
        await asyncio.wait([running])

    async def holds(self, until: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not until():  # noqa: ASYNC110 (a task that runs for ever changes it)
                await asyncio.sleep(0.01)


async def refusal(work: object) -> RyzansteinError:
    with pytest.raises(RyzansteinError) as refused:
        await work  # type: ignore[misc]
    return refused.value


async def test_a_name_stands_for_its_newest_content_and_the_one_before_may_be_asked_for(tmp_path: Path) -> None:
    node = Node()
    old = await node.add("a", written(tmp_path / "a", 1))
    node.resident.add(old.digest)
    new = await node.add("a", written(tmp_path / "a", 2))
    assert node.told[-1].replaced == (old,)
    assert [(each.ref, each.revision, each.resident) for each in node.told[-1].adapters] == [(new, 2, False)]
    assert [each.ref for each in node.adapters.report().adapters] == [new]
    assert node.removed == [old.digest]
    found = node.adapters.registry.find(old)
    assert found is not None, "requests that have come already go on with it"
    assert found.ref == old
    assert node.adapters.registry.with_content(old.digest) == [], "nothing more is said of it when it leaves memory"


async def test_the_one_before_may_be_asked_for_a_minute_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REPLACED_FOR_S", 0.0)
    node = Node()
    old = await node.add("a", written(tmp_path / "a", 1))
    await node.add("a", written(tmp_path / "a", 2))
    assert node.adapters.registry.find(old) is None
    assert node.adapters.report().replaced == ()


async def test_what_is_removed_after_it_was_replaced_is_gone_under_its_name(tmp_path: Path) -> None:
    node = Node()
    await node.add("a", written(tmp_path / "a", 1))
    await node.add("a", written(tmp_path / "a", 2))
    assert node.adapters.remove("a")
    assert (node.told[-1].whole, node.told[-1].adapters) == (True, ())


async def test_a_content_under_two_names_stays_until_both_are_removed(tmp_path: Path) -> None:
    node = Node()
    one = await node.add("one", written(tmp_path / "a", 1))
    two = await node.add("two", tmp_path / "a")
    assert one.digest == two.digest
    node.adapters.remove("one")
    assert node.removed == []
    found = node.adapters.registry.find(one)
    assert found is not None
    assert found.ref == two
    node.adapters.remove("two")
    assert node.removed == [one.digest]


async def test_what_is_removed_while_it_is_read_does_not_come_back(tmp_path: Path) -> None:
    node = Node()
    path, reading, may_read = written(tmp_path / "a", 1), asyncio.Event(), asyncio.Event()
    check = node.adapters.files.check

    async def slow(name: str, where: Path) -> object:
        reading.set()
        await may_read.wait()
        return await check(name, where)

    node.adapters.registry._check = slow  # type: ignore[assignment]
    running = asyncio.create_task(node.adapters.run())
    node.adapters.follow({"a": WantedAdapter(path, 1)}, (b"1", "m"))
    await asyncio.wait_for(reading.wait(), 5)
    node.adapters.follow({}, (b"2", "m"))
    node.adapters.follow({"b": WantedAdapter(path, 1)}, (b"3", "m"))
    may_read.set()
    await node.holds(lambda: "b" in node.names)
    assert node.names == ["b"]
    running.cancel()
    await asyncio.wait([running])


async def test_hundreds_are_told_one_by_one_and_withdrawn_together(tmp_path: Path) -> None:
    node, path = Node(), written(tmp_path / "a", 1)
    wanted = {f"adapter-{number}": WantedAdapter(path, 1) for number in range(100)}
    await node.follow(wanted, lambda: node.adapters.complete and bool(node.told) and node.told[-1].whole)
    *single, last = node.told
    assert [len(each.adapters) for each in single] == [1] * 100
    assert (len(last.adapters), last.whole) == (100, True)
    node.adapters.follow({"adapter-7": wanted["adapter-7"]}, (b"2", "m"))
    assert len(node.told) == 102, "one report of all"
    assert (node.told[-1].whole, [each.ref.name for each in node.told[-1].adapters]) == (True, ["adapter-7"])
    assert node.removed == []


async def test_more_than_there_may_be_are_refused_with_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_ADAPTERS", 2)
    node, path = Node(), written(tmp_path / "a", 1)
    for name in "ab":
        await node.add(name, path)
    error = await refusal(node.add("c", path))
    assert (error.reason, error.metadata) == ("TOO_MANY_ADAPTERS", {"bound": "2"})
    await node.add("a", path)


async def test_one_that_is_larger_than_the_memory_for_adapters_is_refused_when_it_is_added(tmp_path: Path) -> None:
    node = Node(max_bytes=4095)
    error = await refusal(node.add("a", written(tmp_path / "a", 1)))
    assert (error.reason, error.metadata["bound_bytes"]) == ("ADAPTER_NO_ROOM", "4095")
    assert node.names == []


@pytest.mark.parametrize("name", HOSTILE)
async def test_names_are_nothing_but_names(name: str, tmp_path: Path) -> None:
    node = Node()
    await node.add(name, written(tmp_path / "a", 1))
    assert await node.packed(name) == [WEIGHT]
    assert sorted(os.listdir(tmp_path)) == ["a"]
    assert sorted(os.listdir(tmp_path / "a")) == ["adapter_config.json", "adapter_model.safetensors"]
    assert node.adapters.remove(name)


def _rewritten(folder: Path) -> None:
    written(folder, 2)


def _reconfigured(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 64}))


def _deleted(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def _cut(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-40])


def _folder_gone(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def _made_a_fifo(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("change", [_rewritten, _reconfigured, _deleted, _cut, _folder_gone, _made_a_fifo])
async def test_files_that_have_changed_since_are_not_loaded(change: Callable[[Path], None], tmp_path: Path) -> None:
    node = Node()
    await node.add("a", written(tmp_path / "a", 1))
    assert await node.packed("a") == [WEIGHT]
    change(tmp_path / "a")
    error = await asyncio.wait_for(refusal(node.packed("a")), 10)
    assert error.reason == "ADAPTER_UNFIT"
    adapter = node.adapters.registry.get("a")
    assert adapter is not None
    node.adapters.unserve(adapter, error.message)
    assert (node.names, node.adapters.refused["a"].why) == ([], error.message)


async def test_a_node_without_files_left_keeps_the_adapter(tmp_path: Path) -> None:
    node = Node()
    await node.add("a", written(tmp_path / "a", 1))
    limits, next_free = resource.getrlimit(resource.RLIMIT_NOFILE), os.dup(0)
    os.close(next_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_free, limits[1]))
    try:
        error = await refusal(node.packed("a"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (error.reason, error.code) == ("ADAPTER_NOT_SERVED", Code.UNAVAILABLE)
    assert await node.packed("a") == [WEIGHT]
