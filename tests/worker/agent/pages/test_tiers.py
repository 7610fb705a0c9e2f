"""Pages in memory and on disk: bounded, checked, found again by another process, and lost without harm."""

from __future__ import annotations

import asyncio
import errno
import os
from dataclasses import replace

import pytest

from ryzanstein.worker.agent.pages.page import root_of
from ryzanstein.worker.agent.pages.store import StoreFailed
from ryzanstein.worker.agent.pages.tiers import disk_tier
from ryzanstein.worker.agent.pages.tiers.disk_tier import DiskTier
from ryzanstein.worker.agent.pages.tiers.host_tier import HostTier


async def several(pages):
    """Yields batches of pages."""
    for start in range(0, len(pages), 4):
        yield pages[start : start + 4]


class Tier:
    """One tier of either kind, what it said of its size, and how many pages were damaged."""

    def __init__(self, kind, folder, max_bytes) -> None:
        self.size, self.corrupt, self.folder = 0, 0, folder
        given = (max_bytes, self._on_size, self._on_corrupt)
        self.store = HostTier(*given) if kind == "host" else DiskTier(folder, *given)

    def _on_size(self, size) -> None:
        self.size = size

    def _on_corrupt(self) -> None:
        self.corrupt += 1

    async def fetched(self, scope, pages):
        return [page async for page in self.store.fetch(scope, [page.key for page in pages])]


@pytest.mark.parametrize("kind", ["host", "disk"])
async def test_pages_come_back_up_to_the_first_missing_one(tmp_path, chain, scope, kind) -> None:
    tier, pages = Tier(kind, tmp_path, 2**20), chain(20)
    assert await tier.store.missing(scope, [page.key for page in pages]) == list(range(20))
    assert await tier.store.send(scope, b"", several(pages[:11] + pages[12:])) == 19
    assert await tier.store.missing(scope, [page.key for page in pages]) == [11]
    assert await tier.fetched(scope, pages) == pages[:11]
    assert await tier.fetched(scope, pages[12:]) == pages[12:]
    assert 19 * scope.sizes.block_bytes <= tier.size <= 19 * (scope.sizes.block_bytes + 16)


@pytest.mark.parametrize("kind", ["host", "disk"])
async def test_the_least_recently_used_page_goes_first_and_the_bound_holds(tmp_path, chain, scope, kind) -> None:
    tier, old, new = Tier(kind, tmp_path, 10 * (scope.sizes.block_bytes + 16)), chain(6, 1), chain(6, 2)
    await tier.store.send(scope, b"", several(old))
    await tier.store.missing(scope, [page.key for page in old])
    await tier.store.send(scope, b"", several(new))
    assert tier.size <= 10 * (scope.sizes.block_bytes + 16)
    assert await tier.store.missing(scope, [page.key for page in old]) == [4, 5], "the end of a chain before its beginning"
    assert await tier.fetched(scope, new) == new
    if kind == "disk":
        assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) == tier.size


@pytest.mark.parametrize("kind", ["host", "disk"])
async def test_a_page_is_found_under_its_own_root_alone(tmp_path, chain, scope, kind) -> None:
    tier, pages = Tier(kind, tmp_path, 2**20), chain(9)
    other = replace(scope, name="b", root=root_of(b"weights", "format", "b"))
    await tier.store.send(scope, b"", several(pages))
    assert await tier.store.missing(other, [page.key for page in pages]) == list(range(9))
    assert await tier.fetched(other, pages) == []
    assert await tier.fetched(scope, pages) == pages


async def test_pages_of_the_version_before_are_read_and_not_written_again(tmp_path, chain, scope) -> None:
    pages = chain(12)
    earlier = replace(scope, name="alice", root=root_of(b"weights", "format", "alice"))
    await Tier("disk", tmp_path, 2**20).store.send(earlier, b"", several(pages[:8]))
    tier, both = Tier("disk", tmp_path, 2**20), replace(scope, earlier=earlier.root)
    assert await tier.store.missing(both, [page.key for page in pages]) == [8, 9, 10, 11]
    await tier.store.send(both, b"", several(pages[8:]))
    assert await tier.fetched(both, pages) == pages
    assert await tier.fetched(scope, pages) == [], "a request of no such tenant"
    assert len(list(tmp_path.glob("*/*"))) == 12
    damaged = tmp_path / earlier.root.hex() / pages[3].key.hex()
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert await tier.fetched(both, pages) == pages[:3]
    assert tier.corrupt == 1
    assert await tier.store.missing(both, [page.key for page in pages]) == [3]


async def test_another_process_finds_the_pages_and_no_half_written_one(tmp_path, chain, scope) -> None:
    pages = chain(9)
    await Tier("disk", tmp_path, 2**20).store.send(scope, b"", several(pages))
    folder = tmp_path / scope.root.hex()
    half = folder / f"{pages[0].key.hex()}.new"
    half.write_bytes(b"half")
    later = Tier("disk", tmp_path, 2**20)
    assert await later.fetched(scope, pages) == pages
    assert not half.exists()
    smaller = Tier("disk", tmp_path, 4 * (scope.sizes.block_bytes + 16))
    await smaller.store.missing(scope, [])
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize("damage", ["flipped", "short", "empty", "vanished"])
async def test_a_damaged_page_and_those_after_it_are_not_believed(tmp_path, chain, scope, damage) -> None:
    tier, pages = Tier("disk", tmp_path, 2**20), chain(12)
    await tier.store.send(scope, b"", several(pages))
    path = tmp_path / scope.root.hex() / pages[9].key.hex()
    data = path.read_bytes()
    match damage:
        case "flipped":
            path.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
        case "short":
            path.write_bytes(data[:-1])
        case "empty":
            path.write_bytes(b"")
        case "vanished":
            path.unlink()
    assert await tier.fetched(scope, pages) == pages[:9]
    assert tier.corrupt == 1
    assert await tier.store.missing(scope, [page.key for page in pages]) == [9]


async def test_a_disk_that_cannot_be_written_rests_and_breaks_nothing(tmp_path, chain, scope) -> None:
    folder = tmp_path / "file"
    folder.write_bytes(b"")
    with pytest.raises(StoreFailed):
        await Tier("disk", folder, 2**20).store.send(scope, b"", several(chain(1)))
    full = Tier("disk", tmp_path / "pages", 2**20)
    await full.store.missing(scope, [])
    os.symlink("/dev/full", tmp_path / "pages" / scope.root.hex())
    with pytest.raises(StoreFailed):
        await full.store.send(scope, b"", several(chain(1)))
    assert await full.store.missing(scope, [chain(1)[0].key]) == [0]


async def test_files_of_others_in_the_folder_are_never_removed(tmp_path, chain, scope) -> None:
    for name in ("work/sessions.db", "work/README", f"{scope.root.hex()}/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(2**20))
    (tmp_path / "empty").mkdir()
    (tmp_path / "loose.txt").touch()
    tier = Tier("disk", tmp_path, 2 * (scope.sizes.block_bytes + 16))
    await tier.store.send(scope, b"", several(chain(4)))
    assert (tmp_path / "empty").is_dir()
    others = [path for path in tmp_path.rglob("*") if (path.is_file() and path.suffix) or path.name == "README"]
    assert len(others) == 4
    assert tier.size == 2 * (scope.sizes.block_bytes + 12)


async def test_what_is_not_a_page_in_the_folder_is_left_alone(tmp_path, chain, scope) -> None:
    pages = chain(4)
    await Tier("disk", tmp_path, 2**20).store.send(scope, b"", several(pages))
    folder = tmp_path / scope.root.hex()
    (folder / "folder").mkdir()
    (folder / "folder.new").mkdir()
    (folder / "nowhere").symlink_to("nothing")
    (folder / pages[2].key.hex()).unlink()
    os.mkfifo(folder / pages[2].key.hex())
    (folder / pages[3].key.hex()).unlink()
    (folder / pages[3].key.hex()).symlink_to("/dev/zero")
    later = Tier("disk", tmp_path, 2 * (scope.sizes.block_bytes + 16))
    async with asyncio.timeout(5):
        assert await later.store.missing(scope, [page.key for page in pages]) == [2, 3]
        assert await later.fetched(scope, pages) == pages[:2]


@pytest.mark.parametrize("kind", ["fifo", "link"])
async def test_a_page_that_became_something_else_is_not_read(tmp_path, chain, scope, kind) -> None:
    tier, pages = Tier("disk", tmp_path, 2**20), chain(2)
    await tier.store.send(scope, b"", several(pages))
    path = tmp_path / scope.root.hex() / pages[1].key.hex()
    path.unlink()
    os.mkfifo(path) if kind == "fifo" else path.symlink_to("/dev/zero")
    async with asyncio.timeout(5):
        assert await tier.fetched(scope, pages) == pages[:1]
    assert tier.corrupt == 1


async def test_tenants_without_pages_leave_nothing_behind(tmp_path, chain, scope) -> None:
    tier = Tier("disk", tmp_path, 2 * (scope.sizes.block_bytes + 16))
    for number in range(10):
        other = replace(scope, root=bytes([number]) * 16)
        await tier.store.send(other, b"", several(chain(1)))
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2


async def test_two_models_write_the_same_page(tmp_path, chain, scope) -> None:
    tier, pages = Tier("disk", tmp_path, 2**20), chain(30)
    assert await asyncio.gather(*(tier.store.send(scope, b"", several(pages)) for _ in range(4))) == [30] * 4
    assert await tier.fetched(scope, pages) == pages
    assert tier.size == sum(path.stat().st_size for path in tmp_path.glob("*/*"))


async def test_pages_of_another_root_are_other_pages(tmp_path, chain, scope) -> None:
    tier, pages = Tier("host", tmp_path, 2**20), chain(3)
    await tier.store.send(scope, b"", several(pages))
    other = type(scope)(scope.model, "tenant", bytes(16), scope.sizes)
    assert await tier.store.missing(other, [page.key for page in pages]) == [0, 1, 2]
    assert await tier.fetched(other, pages) == []


async def test_a_tier_whose_disk_is_full_makes_way_for_others(tmp_path, chain, scope, monkeypatch) -> None:
    tier, pages = Tier("disk", tmp_path, 2**20), chain(30)
    await tier.store.send(scope, b"", several(pages[:20]))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("ryzanstein.worker.agent.pages.tiers.disk_tier._write", full)
        with pytest.raises(StoreFailed):
            await tier.store.send(scope, b"", several(pages[20:]))
    assert len(await tier.store.missing(scope, [page.key for page in pages[:20]])) == 2
    assert len(list(tmp_path.glob("*/*"))) == 18
    assert await tier.store.send(scope, b"", several(pages[20:])) == 10


async def test_a_full_disk_from_which_nothing_can_be_removed_rests_too(tmp_path, chain, scope, monkeypatch) -> None:
    tier, pages = Tier("disk", tmp_path, 2**20), chain(20)
    await tier.store.send(scope, b"", several(pages))
    oldest = tmp_path / scope.root.hex() / pages[0].key.hex()
    oldest.unlink()
    oldest.mkdir()  # cannot be unlinked

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(disk_tier, "_write", full)
    with pytest.raises(StoreFailed) as failure:
        await tier.store.send(scope, b"", several(chain(1, 2)))
    assert (failure.value.cause, failure.value.rest_s) == ("failed", 30)
    assert await tier.fetched(scope, pages[5:]) == pages[5:]
    assert await tier.store.missing(scope, [page.key for page in pages]) == [], "what is still there counts for the bound"
