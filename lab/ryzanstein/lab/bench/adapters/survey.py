"""The survey: many adapters are registered on a cluster, asked for at random, and the cluster's processes are restarted."""

from __future__ import annotations

import asyncio
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ryzanstein.adapters import DeployedAdapter
from ryzanstein.cli.processes.cluster import ORCHESTRATOR, LocalCluster
from ryzanstein.cli.status.scrape import page
from ryzanstein.lab.bench.adapters.asking import Asked, Asker
from ryzanstein.lab.bench.adapters.beat_sizes import FrameSizes, listening
from ryzanstein.lab.bench.adapters.node_samples import NodeSamples, num_series, resident_bytes, sampled
from ryzanstein.lab.bench.adapters.questions import PROMPTS, AdapterQuestion, ZipfMix
from ryzanstein.survey.adapters import AdapterClient

_READY_S = 300.0
_POLL_S = 0.2
_BY_COMMAND = 3


@dataclass(frozen=True, slots=True)
class AdaptersPlan:
    """What is done. `resident` adapters fit into a node's memory; `checked` are asked for alone first, to compare with."""

    adapters: int = 1000
    resident: int = 100
    seconds: float = 300.0
    rate: float = 4.0
    tokens: int = 16
    exponent: float = 1.0
    checked: int = 20
    restarts: bool = True
    seed: int = 0


@dataclass(slots=True)
class AdaptersFound:
    """What was found. `times_s` says how long each deed took, `sizes` how large things are before and after registration."""

    budget: int = 0
    times_s: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, dict[str, float]] = field(default_factory=dict)
    frames: dict[str, FrameSizes] = field(default_factory=dict)
    base: Asked = field(default_factory=lambda: Asked({}))
    alone: Asked = field(default_factory=lambda: Asked({}))
    mixed: Asked = field(default_factory=lambda: Asked({}))
    after: Asked = field(default_factory=lambda: Asked({}))
    samples: NodeSamples = field(default_factory=lambda: NodeSamples(()))


class AdaptersSurvey:
    """A running cluster, and what is found. `written` are the adapters' directories by name, the most asked for first."""

    def __init__(
        self, cluster: LocalCluster, plan: AdaptersPlan, written: dict[str, Path], tell: Callable[[str], None]
    ) -> None:
        self.cluster, self._plan, self._written, self._tell = cluster, plan, written, tell
        self._base = cluster.spec.model.name
        self._asker = Asker(cluster.router_address, plan.tokens)
        self.found = AdaptersFound()

    @property
    def _nodes(self) -> dict[str, str]:
        return {name: self.cluster.services[name].grpc_address for name in self.cluster.node_ids}

    async def run(self) -> AdaptersFound:
        """Does all of it. Raises RyzansteinError."""
        await self._idle("before")
        mix = ZipfMix((), self._base)
        await self._asker.load(mix.drawn(1), self._plan.rate, min(10.0, self._plan.seconds), Asked({}))  # warms up
        self._tell("the model alone")
        await self._asker.load(mix.drawn(2), self._plan.rate, self._plan.seconds / 2, self.found.base, self._plan.seed)
        await self._register()
        await self._idle("registered")
        await self._serve()
        if self._plan.restarts:
            await self._restart()
        return self.found

    async def _idle(self, when: str) -> None:
        """Measures a cluster that nobody asks."""
        async with listening(self._nodes) as sizes:
            await asyncio.sleep(5)
        self.found.frames[when] = sizes
        services = self.cluster.services
        found = {f"{name} series": float(num_series(service)) for name, service in services.items()}
        found |= {f"{name} resident MiB": resident_bytes(service.pid) / 2**20 for name, service in services.items()}
        began = time.monotonic()
        models = await asyncio.to_thread(page, f"{self.cluster.http_url}/v1/models")
        self.found.times_s[f"/v1/models, {when}"] = time.monotonic() - began
        found["/v1/models bytes"] = float(len(models))
        self.found.sizes[when] = found

    async def _register(self) -> None:
        """Registers some of the adapters with the command, those between with the call that it makes."""
        written = list(self._written.items())
        first, between, last = written[:_BY_COMMAND], written[_BY_COMMAND:-_BY_COMMAND], written[-_BY_COMMAND:]
        self._tell(f"{len(written)} adapters are registered")
        await self._add("adapters add, first", first)
        began = time.monotonic()
        async with AdapterClient(self.cluster.orchestrator_address) as client:
            for name, path in between:
                await client.deploy(DeployedAdapter(name, self._base, str(path)))
        self.found.times_s["DeployAdapter, each"] = (time.monotonic() - began) / max(1, len(between))
        await self._everywhere(len(written) - _BY_COMMAND)
        self.found.times_s["all registered on all nodes"] = time.monotonic() - began
        await self._add("adapters add, last", last)
        await self._timed("adapters list", self._command("list", "--json"))
        await self._listed(len(self._written) + 1)

    async def _add(self, what: str, adapters: list[tuple[str, Path]]) -> None:
        for name, path in adapters:
            await self._timed(what, self._command("add", name, str(path), "--to", self._base))

    async def _serve(self) -> None:
        plan = self._plan
        rng = random.Random(plan.seed)
        names = [*rng.sample(list(self._written), min(plan.checked, len(self._written))), *list(self._written)[:2], self._base]
        questions = [AdapterQuestion(name, prompt) for name in dict.fromkeys(names) for prompt in PROMPTS]
        self._tell(f"{len(questions)} questions alone")
        alone = await self._asker.alone(iter(questions))
        right = {each.question: each.token_ids for each in alone.answers if not each.failure}
        self.found.alone, self.found.mixed, self.found.after = alone, Asked(right), Asked(right)
        mix = ZipfMix(tuple(self._written), self._base, plan.exponent)
        self._tell(f"{plan.seconds:g} s of questions to {len(self._written)} adapters")
        services = [self.cluster.services[name] for name in self.cluster.node_ids]
        async with listening(self._nodes) as sizes, sampled(services) as samples:
            await self._asker.load(mix.drawn(plan.seed + 3), plan.rate, plan.seconds, self.found.mixed, plan.seed)
        self.found.frames["asked"], self.found.samples = sizes, samples
        again = await self._asker.alone(iter(questions))
        for answer in again.answers:
            self.found.after.take(answer)

    async def _restart(self) -> None:
        """Kills each kind of process once. What is asked for next is the adapter that was registered last."""
        num, last = len(self._written), list(self._written)[-1]
        for name in (self.cluster.node_ids[0], self.cluster.router_names[0], ORCHESTRATOR):
            self._tell(f"{name} is killed")
            service, began = self.cluster.services[name], time.monotonic()
            service.kill()
            service.start()
            await asyncio.to_thread(service.wait_ready, time.monotonic() + _READY_S)
            self.found.times_s[f"{name} killed, ready"] = time.monotonic() - began
            await self._everywhere(num)
            await self._listed(num + 1)
            self.found.times_s[f"{name} killed, all adapters there"] = time.monotonic() - began
            asked = await self._asker.alone(iter([AdapterQuestion(last, PROMPTS[0])]))
            self.found.after.answers += asked.answers

    async def _everywhere(self, num: int) -> None:
        """Returns when every node has registered so many."""
        await self._until(lambda: all(self._registered(name) >= num for name in self.cluster.node_ids))

    def _registered(self, node_id: str) -> float:
        try:
            text = page(self.cluster.services[node_id].metrics_url)
        except OSError:
            return 0.0
        lines = (line for line in text.splitlines() if line.startswith("ryzanstein_worker_adapters_registered"))
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    async def _listed(self, num: int) -> None:
        """Returns when the router lists so many models."""

        def listed() -> bool:
            try:
                return page(f"{self.cluster.http_url}/v1/models").count('"object":"model"') >= num
            except OSError:
                return False

        await self._until(listed)

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(_READY_S):
            while not await asyncio.to_thread(holds):  # noqa: ASYNC110 (another process changes it)
                await asyncio.sleep(_POLL_S)

    async def _timed(self, what: str, command: list[str]) -> None:
        """Runs a command; keeps the shortest of its times, and of its processor times."""
        began, used = time.monotonic(), _used_by_children_s()
        await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True, timeout=_READY_S)
        for name, took in ((what, time.monotonic() - began), (f"{what}, processor", _used_by_children_s() - used)):
            self.found.times_s[name] = min(took, self.found.times_s.get(name, took))

    def _command(self, *words: str) -> list[str]:
        program = (sys.executable, "-P", "-m", "ryzanstein.cli", "adapters")
        return [*program, *words, "--orchestrator", self.cluster.orchestrator_address]


def _used_by_children_s() -> float:
    """Returns the processor time of the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
