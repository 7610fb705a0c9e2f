"""An interrupted campaign continues from what it finished, and only from that."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from ryzanstein.lab.chaos.report.progress import Conditions, FinishedRun, ForeignProgressError, Progress
from ryzanstein.lab.chaos.trial.observation import Observation

HERE = Conditions("0.1.0", "a processor", 2, "seed", 3)
SEEN = Observation(
    "sigkill_agent",
    4,
    "greedy",
    20,
    2,
    detected_s=0.01,
    startup_s={"import": 0.5},
    failures=("a", "b"),
    troubles=Counter({"broken": 2}),
    unwanted=Counter(),
)


def test_runs_come_back_as_they_were(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "file", HERE)
    progress.add(FinishedRun(1.5, SEEN))
    progress.add(FinishedRun(2.5, replace(SEEN, run=5)))
    again = Progress(tmp_path / "file", HERE)
    assert again.runs == [FinishedRun(1.5, SEEN), FinishedRun(2.5, replace(SEEN, run=5))]
    assert again.runs[0].observation.troubles.most_common(1) == [("broken", 2)]
    assert again.took_s == 4.0
    again.finish()
    assert not (tmp_path / "file").exists()


def test_without_a_file_runs_are_kept_for_the_report() -> None:
    progress = Progress(None, HERE)
    progress.add(FinishedRun(1.5, SEEN))
    progress.finish()
    assert progress.took_s == 1.5


def test_a_line_cut_off_by_a_crash_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    progress = Progress(path, HERE)
    progress.add(FinishedRun(1.5, SEEN))
    progress.add(FinishedRun(2.5, SEEN))
    path.write_bytes(path.read_bytes()[:-9])
    cut = Progress(path, HERE)
    assert len(cut.runs) == 1
    cut.add(FinishedRun(3.5, SEEN))
    assert [run.took_s for run in Progress(path, HERE).runs] == [1.5, 3.5]


@pytest.mark.parametrize(
    ("conditions", "says"),
    [
        (replace(HERE, cpu="another"), "cpu a processor, not another"),
        (replace(HERE, seed="other", clients=6), "seed seed, not other, clients 3, not 6"),
    ],
)
def test_runs_under_other_conditions_are_not_counted(conditions: Conditions, says: str, tmp_path: Path) -> None:
    Progress(tmp_path / "file", HERE).add(FinishedRun(1.5, SEEN))
    with pytest.raises(ForeignProgressError, match=says):
        Progress(tmp_path / "file", conditions)
    assert len(Progress(tmp_path / "file", HERE).runs) == 1


@pytest.mark.parametrize("content", [b"{}\n", b"\xff\n", b"no end", b'{"version": 1}\n{}\n'])
def test_a_file_of_something_else_is_named_and_kept(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ForeignProgressError, match="is not the progress of a campaign"):
        Progress(path, HERE)
    assert path.read_bytes() == content
