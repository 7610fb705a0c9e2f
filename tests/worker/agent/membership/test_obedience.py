"""The leader that a node knows outlives the node."""

from __future__ import annotations

import pytest

from ryzanstein.leaders.epochs import LeaderEpoch, StaleLeaderError
from ryzanstein.worker.agent.membership.obedience import KeptLeader


async def met(folder, *whose) -> KeptLeader:
    leader = KeptLeader(folder, *whose)
    await leader.load()
    return leader


async def test_a_node_that_starts_again_obeys_no_earlier_leader(tmp_path):
    folder = tmp_path / "new" / "folder"
    first = await met(folder, "node-0", "o:1")
    assert first.latest == LeaderEpoch()
    for leader in (LeaderEpoch(4, "a"), LeaderEpoch(7, "b"), LeaderEpoch(0, "older version")):
        await first.follow(leader)
    second = await met(folder, "node-0", "o:1")
    assert second.latest == LeaderEpoch(7, "b")
    for stale in (LeaderEpoch(4, "a"), LeaderEpoch(7, "c")):
        with pytest.raises(StaleLeaderError):
            await second.follow(stale)
    for other in (("node-1", "o:1"), ("node-0", "p:1")):
        assert (await met(folder, *other)).latest == LeaderEpoch(), "another node, or another cluster"
    assert [path.suffix for path in folder.iterdir()] == [".json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"epoch": "x", "leader_id": 1}', "\0" * 100_000])
async def test_a_damaged_file_stops_nothing_and_is_written_anew(tmp_path, content):
    await (await met(tmp_path, "n")).follow(LeaderEpoch(1, "a"))
    (path,) = tmp_path.iterdir()
    path.write_text(content)
    again = await met(tmp_path, "n")
    await again.follow(LeaderEpoch(2, "b"))
    assert (await met(tmp_path, "n")).latest == LeaderEpoch(2, "b")


async def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    leader = await met(tmp_path / "file" / "folder", "n")
    await leader.follow(LeaderEpoch(3, "a"))
    assert leader.latest == LeaderEpoch(3, "a")
    with pytest.raises(StaleLeaderError):
        await leader.follow(LeaderEpoch(2, "b"))
