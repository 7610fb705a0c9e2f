"""Which GPUs each node of a local cluster gets: nodes of one machine never share one."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Self

from ryzanstein.process.gpus import VISIBLE, Device, Gpus, choose_device


@dataclass(frozen=True, slots=True)
class NodeDevices:
    """The device of all ranks, the names of each node's GPUs, and a sentence if GPUs stay unused; else empty."""

    device: Device = "cpu"
    names: tuple[tuple[str, ...], ...] = ()
    unused: str = ""

    @classmethod
    def chosen(cls, asked: Device, num_nodes: int, num_ranks: int, gpus: Gpus) -> Self:
        """Gives each node as many GPUs as it has ranks.

        Raises FAILED_PRECONDITION if `cuda` is asked for and there are too few.
        """
        nodes = f"a cluster of {num_nodes} node{'s' if num_nodes > 1 else ''} of {num_ranks} rank{'s' if num_ranks > 1 else ''}"
        choice = choose_device(asked, num_nodes * num_ranks, nodes, gpus)
        if choice.device == "cpu":
            return cls(unused=f"no GPU is used: {choice.reason}" if gpus.names and asked == "auto" else "")
        firsts = range(0, num_nodes * num_ranks, num_ranks)
        return cls("cuda", tuple(gpus.names[first : first + num_ranks] for first in firsts))

    def prefix(self, number: int) -> tuple[str, ...]:
        """Returns the words before the command of a node, which show it its own GPUs."""
        return (shutil.which("env") or "/usr/bin/env", f"{VISIBLE}={','.join(self.names[number])}") if self.names else ()
