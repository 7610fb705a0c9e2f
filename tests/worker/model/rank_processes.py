"""Ranks as processes of their own, for a list of jobs: see `rank_program`."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ryzanstein.worker.collectives.segment import segment_bytes
from ryzanstein.worker.engine.plan import StepPlan

_PROGRAM = Path(__file__).with_name("rank_program.py")
_WITHIN_S = 90

Job = tuple[Path, dict[str, Any], list[StepPlan]] | tuple[Path, dict[str, Any], list[StepPlan], dict[int, Path]]
"""A model directory, options, plans; packed adapters by slot."""


def answers_of_ranks(directory: Path, size: int, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """What each of `size` ranks answers. They leave their files in `directory`."""
    (directory / "jobs").write_bytes(pickle.dumps(list(jobs)))
    segment_fd = os.memfd_create("segment")
    os.ftruncate(segment_fd, segment_bytes(size))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(size):
        command = [sys.executable, _PROGRAM, directory / "jobs", rank, size, segment_fd, directory / f"out{rank}"]
        ranks.append(subprocess.Popen([str(part) for part in command], pass_fds=[segment_fd], env=environment))
    os.close(segment_fd)
    try:
        codes = [process.wait(timeout=_WITHIN_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert codes == [0] * size, f"ranks ended with {codes}"
    return [torch.load(directory / f"out{rank}") for rank in range(size)]
