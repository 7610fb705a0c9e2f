"""A process that counts its steps as a rank of vLLM does, one of three."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RANK = """
import sys
from ryzanstein.worker.engines.vllm.board import BoardSlot
slot = BoardSlot(sys.argv[1], int(sys.argv[2]), 3)
for line in sys.stdin:
    getattr(slot, line.strip())()
    print(flush=True)
"""


class Rank:
    """A process that calls the methods of its board slot by name."""

    def __init__(self, path: Path, rank: int) -> None:
        command = [sys.executable, "-c", RANK, str(path), str(rank)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def does(self, *what: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        for each in what:
            print(each, file=self.process.stdin, flush=True)
            self.process.stdout.readline()
