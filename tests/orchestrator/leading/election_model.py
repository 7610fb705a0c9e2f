"""A small world of orchestrators, a lease service and nodes, in virtual time, with everything that can go wrong.

The orchestrators are real elections; what drives them stops for any time at each point where a real one
awaits. Messages take any time, or are lost before or after the service acted on them. Clocks run at
different rates. The service may forget its last writes, or all of them.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace

from ryzanstein.leaders.epochs import KnownLeader, LeaderEpoch, StaleLeaderError
from ryzanstein.orchestrator.leading.election import Election, LeaseWrite
from ryzanstein.orchestrator.leading.lease import LeaseRecord
from ryzanstein.worker.agent.membership.obedience import LateAnswers

CALM_S = 30.0


@dataclass(frozen=True)
class Perils:
    """How bad the world is. Rates are those of the clocks, from the slowest to the fastest."""

    pause: float = 0.03
    loss: float = 0.05
    slow: float = 0.05
    partition: float = 0.01
    rates: tuple[float, float] = (0.93, 1.07)
    forgets: bool = False


class World:
    """Virtual time, with events in order."""

    def __init__(self, rng: random.Random, perils: Perils) -> None:
        self.rng, self.perils = rng, perils
        self.now, self.calm = 0.0, False
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, delay_s: float, do: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + delay_s, self._count, do))

    def run(self, until: float, check: Callable[[], None]) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, do = heapq.heappop(self._events)
            do()
            check()
        self.now = until

    def happens(self, chance: float) -> bool:
        return not self.calm and self.rng.random() < chance

    def travel_s(self) -> float:
        return self.rng.uniform(0.2, 8.0) if self.happens(self.perils.slow) else self.rng.uniform(0.001, 0.05)

    def clock(self) -> Callable[[], float]:
        rate, offset = self.rng.uniform(*self.perils.rates), self.rng.uniform(0, 1e6)
        return lambda: offset + rate * self.now


class Service:
    """The lease service."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.record = LeaseRecord()
        self._history = [self.record]
        self._writes = 0

    def replace(self, write: LeaseWrite) -> LeaseRecord | None:
        if self.record.version != write.seen.version:
            return None
        self._writes += 1
        self.record = replace(write.record, version=str(self._writes))
        self._history.append(self.record)
        if self._world.perils.forgets and self._world.happens(0.02):
            self.record = self._world.rng.choice([LeaseRecord(), *self._history[-20:]])
        return self._history[-1]


@dataclass(eq=False)
class Orchestrator:
    """One orchestrator: the election, and what drives it."""

    world: World
    service: Service
    name: str
    clock: Callable[[], float] = lambda: 0.0
    lives: int = 0
    paused_until: float = 0.0
    cut_until: float = 0.0
    terms: int = 0
    election: Election = field(init=False)

    def __post_init__(self) -> None:
        self.clock = self.world.clock()
        self.start()

    def start(self) -> None:
        self.lives += 1
        self.election = Election(f"{self.name}{self.lives}", self.name, self.clock)
        self._go(self._drive(self.lives))

    @property
    def acts(self) -> LeaderEpoch | None:
        tenure = self.election.tenure
        return None if tenure is None else tenure.leader

    def _go(self, steps: Generator[float, None, None]) -> None:
        for delay_s in steps:
            self.world.after(delay_s, lambda: self._go(steps))
            return

    def _pause(self) -> float:
        """How long this process stands still here."""
        if self.world.happens(self.world.perils.pause):
            pause_s = self.world.rng.choice([0.5, 2.0, 3.5, 6.0, 12.0])
            self.paused_until = self.world.now + pause_s
            return pause_s
        if self.world.happens(self.world.perils.partition):
            self.cut_until = self.world.now + self.world.rng.uniform(1, 12)
        return 0.0

    def _drive(self, life: int) -> Generator[float, None, None]:
        """What a campaign does, with a pause at each await."""
        world, election = self.world, self.election
        while life == self.lives:
            write = election.wanted()
            yield self._pause()
            started, answers = self.clock(), []
            cut = self.cut_until > world.now or world.happens(world.perils.loss)
            there_s, back_s = world.travel_s(), world.travel_s()
            if not cut:
                answered = not world.happens(world.perils.loss)

                def arrive(write: LeaseWrite | None = write, answered: bool = answered, answers: list = answers) -> None:
                    found = self.service.record if write is None else self.service.replace(write)
                    if answered:
                        answers.append(found)

                world.after(there_s, arrive)
            yield min(there_s + back_s, 1.0)
            yield self._pause()
            if answers and (answers[0] is not None or write is None):
                if write is None:
                    election.read(answers[0])
                else:
                    election.written(write, answers[0], started)
            elif answers:
                yield world.travel_s()
                election.read(self.service.record)
            yield self._pause()
            yield 0.5 if election.tenure is None else 0.7


@dataclass(eq=False)
class Agent:
    """A node: it beats to an orchestrator that answers, and obeys as a real one does."""

    world: World
    orchestrators: list[Orchestrator]
    accepted: Callable[[Agent, LeaderEpoch, bool], None]
    known: KnownLeader = field(default_factory=KnownLeader)
    late: LateAnswers = field(init=False)
    at: int = 0

    def __post_init__(self) -> None:
        self.late = LateAnswers(self.world.clock())
        self.world.after(self.world.rng.random(), self.beat)

    def beat(self) -> None:
        sequence, known = self.late.sent(), self.known.latest
        orchestrator = self.orchestrators[self.at % len(self.orchestrators)]
        self.world.after(self.world.travel_s(), lambda: self._arrive(orchestrator, sequence, known))
        self.world.after(0.5, self.beat)

    def _arrive(self, orchestrator: Orchestrator, sequence: int, known: LeaderEpoch) -> None:
        if orchestrator.paused_until > self.world.now:
            delay_s = orchestrator.paused_until - self.world.now
            self.world.after(delay_s, lambda: self._arrive(orchestrator, sequence, known))
            self.at += 1
            return
        leader = orchestrator.acts
        if leader is not None and leader.is_stale_after(known):
            orchestrator.election.doubted(known)
            leader = None
        if leader is None:
            self.at += 1
            return
        tenure = orchestrator.election.tenure
        moves = tenure is not None and orchestrator.clock() >= tenure.keeps_until
        # A pause between the decision and the socket is as good as a slow network.
        self.world.after(self.world.travel_s(), lambda: self._answered(leader, sequence, moves))

    def _answered(self, leader: LeaderEpoch, sequence: int, moves: bool) -> None:
        try:
            self.known.follow(leader)
        except StaleLeaderError:
            self.at += 1
            return
        if not self.late.are_void(sequence):
            self.accepted(self, leader, moves)


class Run:
    """One run with a seed; raises AssertionError where an invariant is broken."""

    def __init__(self, seed: int, perils: Perils, duration_s: float = 120.0) -> None:
        rng = random.Random(f"election {seed}")
        self.world = World(rng, perils)
        self.service = Service(self.world)
        self.orchestrators = [Orchestrator(self.world, self.service, name) for name in "abc"[: rng.choice([2, 3])]]
        self.agents = [Agent(self.world, self.orchestrators, self._accepted) for _ in range(4)]
        self.last: dict[Agent, LeaderEpoch] = {}
        self.moved = LeaderEpoch()
        self.epochs: set[int] = set()
        self.duration_s = duration_s

    def run(self) -> int:
        """Returns how many leaders moved models."""
        for _ in range(self.world.rng.randrange(4)):
            self.world.after(self.world.rng.uniform(0, self.duration_s), self._kill)
        self.world.run(self.duration_s, self._check)
        self.world.calm = True
        self.world.run(self.duration_s + CALM_S, self._check)
        leading = [each for each in self.orchestrators if each.acts is not None]
        assert len(leading) == 1, "there is no leader in a calm world"
        self.last.clear()
        self.world.run(self.world.now + 3, self._check)
        assert set(self.last.values()) == {leading[0].acts}, "its nodes do not follow it"
        return len(self.epochs)

    def _kill(self) -> None:
        """Restarts an orchestrator, with a signal that lets it give the lease back, or without."""
        chosen = self.world.rng.choice(self.orchestrators)
        if self.world.rng.random() < 0.5 and (back := chosen.election.resign()) is not None:
            self.world.after(self.world.travel_s(), lambda: self.service.replace(back))
        chosen.start()

    def _check(self) -> None:
        acting = [each.acts for each in self.orchestrators if each.acts is not None]
        assert self.world.perils.forgets or len(acting) <= 1, f"two leaders act: {acting}"

    def _accepted(self, agent: Agent, leader: LeaderEpoch, moves: bool) -> None:
        assert not leader.is_stale_after(self.last.get(agent, LeaderEpoch())), "a node obeyed an earlier leader"
        self.last[agent] = leader
        if moves:
            self.epochs.add(leader.epoch)
            assert self.world.perils.forgets or leader.epoch >= self.moved.epoch, "an earlier leader moved a model"
            self.moved = max(self.moved, leader)
