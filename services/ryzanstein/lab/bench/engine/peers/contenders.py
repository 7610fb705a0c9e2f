"""The contenders: our own ranks and the peers, each started for its turn and ended after it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from ryzanstein import errors
from ryzanstein.lab.bench.engine.flight import Engines, losses_as_errors
from ryzanstein.lab.bench.engine.peers.catalog import PEERS, Peer
from ryzanstein.lab.bench.engine.peers.conversion import converted
from ryzanstein.lab.bench.engine.peers.environment import process_environment, python_of
from ryzanstein.lab.bench.engine.peers.process import PeerProcess, runner_command
from ryzanstein.lab.bench.engine.peers.runners.protocol import Settings
from ryzanstein.lab.bench.engine.peers.timing import Timing
from ryzanstein.worker.ranks.messages import RankSpec

OWN = "ryzanstein"


@dataclass(frozen=True, slots=True, order=True)
class Label:
    """The name of a contender in the results."""

    engine: str
    quantization: str
    tp: int

    def __str__(self) -> str:
        return f"{self.engine} {self.quantization} tp {self.tp}"


class Running(Protocol):
    """A contender in its turn."""

    @property
    def facts(self) -> Mapping[str, str]: ...

    async def generate(self, prompts: Sequence[list[int]], new_tokens: int) -> Timing: ...


class Contender(Protocol):
    """A participant that starts for a turn.

    What it raises then and during the turn is PeerFailed, a RyzansteinError or an OSError.
    """

    @property
    def label(self) -> Label: ...

    def turn(self) -> AbstractAsyncContextManager[Running]: ...


class OwnContender:
    """Our ranks under one configuration."""

    def __init__(self, spec: RankSpec, vocab_size: int) -> None:
        self.label = Label(OWN, spec.quantization, spec.tp)
        self._spec = spec
        self._vocab_size = vocab_size

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Running]:
        with losses_as_errors():
            async with Engines(self._spec, self._vocab_size) as engines:
                yield _OwnRanks(engines)


class _OwnRanks:
    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self.facts: Mapping[str, str] = {}

    async def generate(self, prompts: Sequence[list[int]], new_tokens: int) -> Timing:
        return Timing.of_round(await self._engines.generate(prompts, new_tokens))


@dataclass(frozen=True, slots=True)
class Site:
    """The peers and their settings.

    `settings` fits each peer except for its model, quantization and number of ranks.
    """

    peers: tuple[Peer, ...]
    peers_dir: Path
    model: Path
    settings: Settings
    timeout_s: float


class PeerContender:
    """A peer that is installed."""

    def __init__(self, peer: Peer, site: Site) -> None:
        self.label = label_of(peer)
        self._peer = peer
        self._site = site
        self._variables = process_environment(max(1, site.settings.threads // peer.tp))

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Running]:
        python = python_of(self._site.peers_dir, self._peer.environment)
        settings = asdict(self._site.settings) | {
            "model": str(await self._model()),
            "quantization": self._peer.quantization,
            "tp": self._peer.tp,
        }
        command = runner_command(python, self._peer.runner, settings)
        async with PeerProcess(command, self._variables, self._site.timeout_s) as process:
            yield process

    async def _model(self) -> Path:
        peer, site = self._peer, self._site
        if peer.format is None:
            return site.model
        return await converted(site.model, peer.format, site.peers_dir, peer.environment, self._variables)


def label_of(peer: Peer) -> Label:
    return Label(peer.engine, peer.quantization, peer.tp)


def choose_peers(names: str) -> tuple[Peer, ...]:
    """Returns all peers without names, otherwise those of the comma-separated engines.

    Raises INVALID_ARGUMENT for an unknown one.
    """
    known = dict.fromkeys(peer.engine for peer in PEERS)
    wanted = names.split(",") if names else list(known)
    if not set(wanted) <= known.keys():
        raise errors.invalid("only", f"must be one of {', '.join(known)}", names)
    return tuple(peer for peer in PEERS if peer.engine in wanted)


def present_peers(site: Site) -> tuple[list[PeerContender], dict[Label, str]]:
    """Returns the peers that can run here, and for each of the others why not."""
    contenders, absent = [], {}
    for peer in site.peers:
        if why := _why_absent(peer, site):
            absent[label_of(peer)] = why
        else:
            contenders.append(PeerContender(peer, site))
    return contenders, absent


def _why_absent(peer: Peer, site: Site) -> str:
    python = python_of(site.peers_dir, peer.environment)
    if not python.exists():
        return f"not installed: {python} does not exist"
    if peer.tp > site.settings.threads:
        return f"{peer.tp} ranks need at least {peer.tp} threads, got {site.settings.threads}"
    return ""
