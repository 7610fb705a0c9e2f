"""Adapters of models, as nodes report them to routers: low-rank changes of a model's weights (LoRA, Hu et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from ryzanstein.generation.request import AdapterRef

MAX_ADAPTERS = 4096
"""Of one model on one node."""


@dataclass(frozen=True, slots=True)
class NodeAdapter:
    """An adapter that a node has registered.

    Of two nodes with different content under one name, the larger `revision` is the newer one. `resident`: it is in the
    memory of the ranks; otherwise a request loads it.
    """

    ref: AdapterRef
    revision: int = 0
    resident: bool = False


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """What a node tells its routers: all its adapters if it is `whole`, else those that have changed, none of which went away.

    `replaced` are those, or others of those, that requests may still name by their content, while their names stand for others.
    """

    adapters: tuple[NodeAdapter, ...] = ()
    whole: bool = False
    replaced: tuple[AdapterRef, ...] = ()


@dataclass(frozen=True, slots=True)
class DeployedAdapter:
    """An adapter that should be registered on every node of its model: a directory or file on the nodes.

    `revision`, from 1, counts how often its files were to be read; the orchestrator sets it. A `pinned` one is not evicted.
    """

    name: str
    model: str
    path: str
    pinned: bool = False
    revision: int = 0


@dataclass(frozen=True, slots=True)
class DeployedAdapters:
    """All of them, and the digest that tells whether a node knows them."""

    digest: bytes = b""
    adapters: tuple[DeployedAdapter, ...] = ()
