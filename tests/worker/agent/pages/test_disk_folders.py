"""Folders of disk tiers: those of living nodes stay, and so does all that is not a page."""

from __future__ import annotations

import os
import time

import pytest

from ryzanstein.worker.agent.pages.tiers.disk_folders import claim, remove_abandoned
from ryzanstein.worker.agent.pages.tiers.disk_tier import DiskTier

HOUR_S = 3600.0
DAYS_S = 9 * 24 * HOUR_S


@pytest.fixture
async def filled(tmp_path, chain, scope):
    """Two folders of nodes with a page each, used nine days ago, and the own one."""

    async def pages():
        yield chain(1)

    for name in ("dead", "alive"):
        tier = DiskTier(tmp_path / name, 2**20, lambda size: None, lambda: None)
        await tier.send(scope, b"", pages())
        os.close(tier._owner)
    for path in tmp_path.glob("**/*"):
        os.utime(path, (time.time() - DAYS_S,) * 2)
    return tmp_path


async def test_a_folder_that_no_node_has_used_for_long_is_removed_and_that_of_a_living_node_is_not(filled) -> None:
    lock = claim(filled / "alive")
    os.utime(filled / "alive" / "owner", (time.time() - DAYS_S,) * 2)
    assert remove_abandoned(filled / "own", DAYS_S + HOUR_S) == []
    assert remove_abandoned(filled / "own", DAYS_S - HOUR_S) == ["dead"]
    assert sorted(path.name for path in filled.iterdir()) == ["alive"]
    os.close(lock)
    assert remove_abandoned(filled / "own", DAYS_S - HOUR_S) == ["alive"]


async def test_the_clock_of_the_file_system_says_how_long_ago_that_was(filled, monkeypatch) -> None:
    """It may be a server's, and that of this host another one."""
    os.close(claim(filled / "own"))
    monkeypatch.setattr("ryzanstein.worker.agent.pages.tiers.disk_folders.time.time", lambda: 0.0)
    assert remove_abandoned(filled / "own", DAYS_S + HOUR_S) == []
    assert remove_abandoned(filled / "own", DAYS_S - HOUR_S) == ["alive", "dead"]


async def test_a_page_that_was_written_lately_keeps_its_folder(filled) -> None:
    (root,) = (path for path in (filled / "dead").iterdir() if path.is_dir())
    (root / "something").touch()
    assert remove_abandoned(filled / "own", DAYS_S - HOUR_S) == ["alive"]


async def test_what_is_not_a_page_is_neither_removed_nor_followed(filled) -> None:
    elsewhere = filled.parent / "elsewhere"
    (elsewhere / ("0" * 32)).mkdir(parents=True)
    (elsewhere / ("0" * 32) / ("0" * 34)).write_text("not mine")
    (filled / "dead" / ("0" * 32)).symlink_to(elsewhere / ("0" * 32))
    (filled / "link").symlink_to(elsewhere)
    (filled / "dead" / "notes.txt").write_text("keep")
    (filled / "unclaimed").mkdir()
    remove_abandoned(filled / "own", HOUR_S)
    assert (elsewhere / ("0" * 32) / ("0" * 34)).read_text() == "not mine"
    assert (filled / "dead" / "notes.txt").read_text() == "keep"
    assert (filled / "unclaimed").is_dir(), "no node has claimed it"
    assert not list((filled / "dead").glob("*/*" + "0" * 3)) or (filled / "dead" / ("0" * 32)).is_symlink()


async def test_a_tier_removes_what_others_left_when_it_is_first_used(filled, scope) -> None:
    tier = DiskTier(filled / "own", 2**20, lambda size: None, lambda: None, keep_s=HOUR_S)
    assert await tier.missing(scope, []) == []
    assert sorted(path.name for path in filled.iterdir()) == ["own"]
    os.close(tier._owner)


async def test_a_folder_that_was_only_read_lately_counts_as_used(filled, scope, monkeypatch) -> None:
    tier = DiskTier(filled / "own", 2**20, lambda size: None, lambda: None)
    await tier.missing(scope, [])
    old = time.time() - DAYS_S
    os.utime(filled / "own" / "owner", (old, old))
    await tier.missing(scope, [])
    assert (filled / "own" / "owner").stat().st_mtime == pytest.approx(old), "at most once a minute"
    tier._marked_s -= 60
    await tier.missing(scope, [])
    os.close(tier._owner)
    assert remove_abandoned(filled / "other", HOUR_S) == ["alive", "dead"]
