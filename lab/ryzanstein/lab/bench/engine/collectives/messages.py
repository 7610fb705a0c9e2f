"""The messages between the collectives benchmark and its ranks.

They use the same channels as a node's ranks.
"""

from __future__ import annotations

import msgspec

from ryzanstein.worker.ranks.messages import RankCrashed, StartRank

ELEMENT_BYTES = 4  # float32: the type of activations on a CPU
OPS = ("all_reduce", "all_gather", "broadcast")


class RunCollective(msgspec.Struct, tag=True, frozen=True):
    """A request to run one of OPS `iterations` times.

    `num_elements` is what every rank holds afterwards, a multiple of the ranks. `verify`: first run
    it once with operands whose result is known.
    """

    op: str
    num_elements: int
    iterations: int
    verify: bool


class CollectiveReady(msgspec.Struct, tag=True, frozen=True):
    """This rank has joined its group."""

    rank: int


class CollectiveRan(msgspec.Struct, tag=True, frozen=True):
    """When this rank entered and left each run.

    Times are nanoseconds on the monotonic clock, which all processes of a machine share.
    """

    rank: int
    begun_ns: list[int]
    ended_ns: list[int]


BenchmarkMessage = StartRank | RunCollective
BenchmarkAnswer = CollectiveReady | CollectiveRan | RankCrashed
