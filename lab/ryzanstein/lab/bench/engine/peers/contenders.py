"""The contenders: our own ranks and the peers, each started for its turn and ended after it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from ryzanstein import errors
from ryzanstein.files.model_paths import is_gguf
from ryzanstein.lab.bench.engine.flight import Engines, losses_as_errors
from ryzanstein.lab.bench.engine.peers.catalog import CHECKPOINT, FILE_PEERS, PEERS, Peer
from ryzanstein.lab.bench.engine.peers.conversion import converted
from ryzanstein.lab.bench.engine.peers.environment import process_environment, python_of
from ryzanstein.lab.bench.engine.peers.process import PeerProcess, runner_command
from ryzanstein.lab.bench.engine.peers.runners.protocol import Settings
from ryzanstein.lab.bench.engine.peers.timing import Timing
from ryzanstein.worker.ranks.messages import RankSpec

OWN = "ryzanstein"
GGUF = "gguf"
FULL_PRECISION = ("none", GGUF)
"""The formats whose weights are those of the model that was named: nothing is quantized again."""


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
        self.label = own_label(spec)
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
        ready = engines.ready[0]
        self.facts: Mapping[str, str] = {"kernels": ready.kernels or f"torch: {ready.without_kernels}"}

    async def generate(self, prompts: Sequence[list[int]], new_tokens: int) -> Timing:
        return Timing.of_round(await self._engines.generate(prompts, new_tokens))


@dataclass(frozen=True, slots=True)
class Site:
    """The peers and their settings.

    `settings` fits each peer except for its model, quantization and number of ranks. `model` is
    what our ranks serve, a directory or a GGUF file; `checkpoint` is the directory of the same
    model, or None if there is only the file.
    """

    peers: tuple[Peer, ...]
    peers_dir: Path
    model: Path
    checkpoint: Path | None
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
        convert = partial(converted, peers_dir=site.peers_dir, environment=peer.environment, variables=self._variables)
        return await convert(site.checkpoint or await convert(site.model, CHECKPOINT), peer.format)


def label_of(peer: Peer) -> Label:
    return Label(peer.engine, peer.quantization, peer.tp)


def own_label(spec: RankSpec) -> Label:
    as_stored = spec.settings.quantization == "none" and is_gguf(Path(spec.model))
    return Label(OWN, GGUF if as_stored else spec.settings.quantization, spec.tp)


def choose_peers(names: str, model: Path) -> tuple[Peer, ...]:
    """Returns the peers of a directory or a GGUF file, with names those of the comma-separated engines.

    Raises INVALID_ARGUMENT for an unknown one.
    """
    peers = FILE_PEERS if is_gguf(model) else PEERS
    known = dict.fromkeys(peer.engine for peer in peers)
    wanted = names.split(",") if names else list(known)
    if not set(wanted) <= known.keys():
        raise errors.invalid("only", f"must be one of {', '.join(known)}", names)
    return tuple(peer for peer in peers if peer.engine in wanted)


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
