"""A soak: a cluster of its own, a load at a share of what it can serve, a fault a minute, and samples all along."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ryzanstein.cli.processes.cluster import ORCHESTRATOR, ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.load.arrivals import poisson
from ryzanstein.lab.load.capacity import NUM_PROMPTS, capacity, routers_of
from ryzanstein.lab.load.run import LoadBounds, LoadRun
from ryzanstein.lab.load.workload import Shape, conversations
from ryzanstein.lab.soak.samples import Samples, Watched
from ryzanstein.lab.soak.strikes import NODE, ROUTER, order


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """Seconds throughout. `share` is of the most requests a second that the cluster serves without a fault."""

    seconds: float
    share: float = 0.7
    strike_every_s: float = 60.0
    sample_every_s: float = 10.0
    num_users: int = 500
    """They come back, as users do: what routers and nodes keep of each is full before growth counts."""
    seed: int = 0
    shape: Shape = field(default_factory=Shape)


@dataclass(slots=True)
class Soak:
    """What a soak saw. `strikes` are times after the start, in seconds, with the fault's name; `broken` says what ended it."""

    plan: SoakPlan
    run: LoadRun
    samples: Samples
    capacity_per_s: float
    strikes: list[tuple[float, str]] = field(default_factory=list)
    broken: str = ""


async def soak(plan: SoakPlan, tell: Callable[[str], None]) -> Soak:
    """Runs to its end, or until it is cancelled: what was seen until then counts."""
    cluster = LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=2, num_routers=2, tp=1))
    await asyncio.to_thread(cluster.start)
    try:
        routers = routers_of(cluster)
        shape = await LoadRun(routers, LoadBounds()).measure(plan.shape)
        capacity_per_s = await capacity(routers, shape, plan.seed)
        tell(f"capacity: {capacity_per_s:.1f} requests/s; {plan.share:.0%} of it for {plan.seconds / 60:.0f} minutes")
        seen = Soak(
            plan,
            LoadRun(routers, LoadBounds(plan.seconds, num_users=plan.num_users), plan.seed),
            Samples(_lasting(cluster)),
            capacity_per_s,
        )
        await _all_of_it(seen, shape, cluster, tell)
        return seen
    finally:
        await asyncio.to_thread(cluster.stop)


async def _all_of_it(seen: Soak, shape: Shape, cluster: LocalCluster, tell: Callable[[str], None]) -> None:
    plan = seen.plan
    times = poisson(plan.share * seen.capacity_per_s, random.Random(plan.seed))
    load = asyncio.ensure_future(seen.run.open(conversations(shape, NUM_PROMPTS, plan.seed), times))
    beside = [asyncio.ensure_future(_sample(seen)), asyncio.ensure_future(_strike(seen, cluster, tell))]
    try:
        done, _ = await asyncio.wait([load, *beside], return_when=asyncio.FIRST_COMPLETED)
        if load not in done:
            (failed, *_) = done
        else:
            failed = load
        if failed.exception() is not None:
            seen.broken = f"the laboratory failed: {failed.exception()!r}"
    except asyncio.CancelledError:
        seen.broken = "interrupted"
    finally:
        for task in (load, *beside):
            task.cancel()
        await asyncio.gather(load, *beside, return_exceptions=True)


async def _sample(seen: Soak) -> None:
    started = time.monotonic()
    while True:
        await asyncio.to_thread(seen.samples.take, time.monotonic() - started)
        await asyncio.sleep(seen.plan.sample_every_s)


async def _strike(seen: Soak, cluster: LocalCluster, tell: Callable[[str], None]) -> None:
    """Strikes in the middle of each interval, and not in the last one: what is struck has time to return."""
    started, following = time.monotonic(), order(seen.plan.seed)
    at_s = seen.plan.strike_every_s / 2
    while at_s < seen.plan.seconds - seen.plan.strike_every_s / 2:
        await asyncio.sleep(max(0.0, started + at_s - time.monotonic()))
        strike = following()
        seen.strikes.append((round(time.monotonic() - started, 1), strike.name))
        tell(f"{at_s / 60:.1f} min: {strike.name}; {len(seen.run.outcomes)} answers so far, {seen.run.num_wrong} wrong")
        await strike.act(cluster)
        at_s += seen.plan.strike_every_s
    await asyncio.Event().wait()


def _lasting(cluster: LocalCluster) -> tuple[Watched, ...]:
    """Returns what no strike ends."""
    names = [ORCHESTRATOR, *(name for name in (*cluster.router_names, *cluster.node_ids) if name not in (NODE, ROUTER))]
    return tuple(Watched(name, cluster.services[name].pid, cluster.services[name].metrics_url) for name in names)


def facts(seen: Soak) -> dict[str, Any]:
    """Returns how the soak was made."""
    plan = seen.plan
    return {
        "seconds": plan.seconds,
        "share": plan.share,
        "capacity_per_s": round(seen.capacity_per_s, 2),
        "strike_every_s": plan.strike_every_s,
        "seed": plan.seed,
        "users": plan.num_users,
        "input_tokens": plan.shape.num_input,
        "output_tokens": plan.shape.num_output,
        "strikes": seen.strikes,
        "broken": seen.broken,
    }
