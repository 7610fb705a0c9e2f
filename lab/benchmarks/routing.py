"""Simulates the routing policies with the router's own choosers, for docs/internals/decisions.md.

    .venv/bin/python lab/benchmarks/routing.py [--sessions 10000] [--nodes 4 100] [--policy bounded] [--seed 1] [--json]

10,000 conversations within an hour; those of one user have the same beginning, and their number per user is Zipf-distributed.
Every turn sends the whole history. Each node has a finite LRU cache, of 1.5 times the size that concurrent conversations need
on average. No real time passes: choosers get the simulated clock. A seed gives the same figures on every machine.

One row per cluster, policy, number of routers and kind of key. `imbalance`: requests of the fullest node over the mean, over
the hour. `window`: the mean of the first router's metric after ten minutes. `computed`: the same imbalance of prompt tokens
that were not found in a cache. `found`: share of prompt tokens found. `moved`: turns that went to another node than the turn
before, while no node joined or left. `leave`, `join`: the share of conversations in progress whose next turn went to another
node; without a map, 1/N of them must move.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import statistics
from collections import Counter, OrderedDict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import get_args

from ryzanstein.cluster import Load, NodeState
from ryzanstein.generation.prompts import ChatPrompt, Message, Role
from ryzanstein.generation.request import GenerationRequest, SamplingParams
from ryzanstein.router.choose import (
    BalanceSettings,
    ChoiceOutcome,
    Chooser,
    Imbalance,
    Members,
    NodeView,
    PolicyChoice,
    PolicyName,
)

HOUR_S = 3600.0
MEAN_TURNS = 8
THINK_S = 20.0
ANSWER_S = 4.0
ANSWER_TOKENS = 150
QUESTION_TOKENS = 50
SHARED_TOKENS = 500
CHARS_PER_TOKEN = 4
CAPACITY = 64
ZIPF = 1.0
CACHE_HEADROOM = 1.5
WARM_S = 600.0
LEAVE_S, JOIN_S = 1800.0, 2400.0


@dataclass(frozen=True, slots=True)
class Turn:
    """`prompt_tokens` with the whole history; `shared_tokens` of them begin every conversation of the user."""

    at: float
    session: int
    user: int
    prompt_tokens: int
    answer_tokens: int


def conversations(num: int, seed: int) -> list[Turn]:
    """All turns in the order of time."""
    draw = random.Random(seed)
    weights = [1 / rank**ZIPF for rank in range(1, num // 10 + 1)]
    users = draw.choices(range(len(weights)), weights, k=num)
    turns = [turn for session, user in enumerate(users) for turn in _conversation(draw, session, user)]
    return sorted(turns, key=lambda turn: (turn.at, turn.session))


def _conversation(draw: random.Random, session: int, user: int) -> Iterator[Turn]:
    at, history = draw.uniform(0, HOUR_S), SHARED_TOKENS
    for _ in range(1 + int(draw.expovariate(1 / (MEAN_TURNS - 0.5)))):
        history += 1 + int(draw.expovariate(1 / QUESTION_TOKENS))
        answer = 1 + int(draw.expovariate(1 / ANSWER_TOKENS))
        yield Turn(at, session, user, history, answer)
        history += answer
        at += ANSWER_S * answer / ANSWER_TOKENS + draw.expovariate(1 / THINK_S)


class Cache:
    """One node's: how many tokens of each conversation and of each user's beginning it holds."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens
        self._held: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._total = 0

    def serve(self, turn: Turn) -> int:
        """Prompt tokens found; afterwards it holds the turn with its answer."""
        shared = self._held.get(("user", turn.user), 0)
        found = max(self._held.get(("session", turn.session), 0), shared)
        self._hold(("user", turn.user), SHARED_TOKENS)
        self._hold(("session", turn.session), turn.prompt_tokens + turn.answer_tokens)
        return min(found, turn.prompt_tokens)

    def _hold(self, what: tuple[str, int], tokens: int) -> None:
        self._total += tokens - self._held.pop(what, 0)
        self._held[what] = tokens
        while self._total > self._capacity:
            self._total -= self._held.popitem(last=False)[1]


@dataclass
class Listener:
    """What the first router's metrics would show."""

    outcomes: Counter[str] = field(default_factory=Counter)
    seen: list[float] = field(default_factory=list)
    switches: list[PolicyName] = field(default_factory=list)

    def chosen(self, model: str, policy: PolicyName, outcome: ChoiceOutcome) -> None:
        self.outcomes[outcome] += 1

    def judged(self, model: str, placed: Imbalance, alarm: bool) -> None:
        self.seen.append(placed.ratio)

    def switched(self, model: str, policy: PolicyName, wanted: Imbalance) -> None:
        self.switches.append(policy)


@dataclass(frozen=True, slots=True)
class Case:
    nodes: int
    policy: PolicyName
    routers: int = 1
    key: str = "session"
    switches: bool = False
    """Affinity may become bounded, as it does in a router."""


class Cluster:
    """Nodes, routers and the simulated time."""

    def __init__(self, case: Case, cache_tokens: int, seed: int) -> None:
        self.now = 0.0
        self.case = case
        self.listener = Listener()
        names = [f"node-{i}" for i in range(case.nodes)]
        self.views = {name: NodeView(name, "m", NodeState.READY, Load(capacity=CAPACITY)) for name in names}
        self.members = Members.of(self.views.values())
        self.caches = {name: Cache(cache_tokens) for name in names}
        self._routers = [self._router(i) for i in range(case.routers)]
        self._draw = random.Random(seed)
        self._running: list[tuple[float, str]] = []

    def _router(self, number: int) -> Chooser:
        balance = BalanceSettings()
        if not self.case.switches:
            balance = replace(balance, thresholds=replace(balance.thresholds, switch=math.inf))
        listener = Listener() if number else self.listener
        return Chooser(PolicyChoice(self.case.policy, first_turn=number), balance, listener, lambda: self.now)

    def serve(self, turn: Turn, last_node: str) -> str:
        """Gives the turn to a node, through any of the routers; they share a session store that knows the last node."""
        self._advance(turn.at)
        chooser = self._draw.choice(self._routers)
        request = _request(turn, self.case.key, last_node)
        ranking = chooser.rank(self.members, "m", chooser.affinity_of(request))
        node = ranking.node_ids[0]
        chooser.place(ranking, node)
        heapq.heappush(self._running, (turn.at + ANSWER_S * turn.answer_tokens / ANSWER_TOKENS, node))
        self._run(node, 1)
        return node

    def _advance(self, now: float) -> None:
        self.now = now
        while self._running and self._running[0][0] <= now:
            self._run(heapq.heappop(self._running)[1], -1)

    def _run(self, node: str, more: int) -> None:
        view = self.views[node]
        self._put(replace(view, load=replace(view.load, running=view.load.running + more)))

    def _put(self, view: NodeView) -> None:
        self.views[view.node_id] = view
        self.members.put(view)

    def drain(self, node: str, draining: bool) -> None:
        self._put(replace(self.views[node], drain_requested=draining))


def _request(turn: Turn, key: str, last_node: str) -> GenerationRequest:
    """The conversation as text whose length and beginnings are right; keys as clients send them."""
    shared = f"{turn.user:08d}" * (SHARED_TOKENS * CHARS_PER_TOKEN // 8)
    own = f"{turn.session:08d}" * ((turn.prompt_tokens - SHARED_TOKENS) * CHARS_PER_TOKEN // 8)
    prompt = ChatPrompt((Message(Role.SYSTEM, "Be brief."), Message(Role.USER, shared + own)))
    if key == "user":
        return GenerationRequest("m", prompt, SamplingParams(), user=str(turn.user))
    return GenerationRequest("m", prompt, SamplingParams(), session_id=str(turn.session), last_node=last_node)


@dataclass
class Tally:
    """Where turns went and what they found."""

    requests: Counter[str] = field(default_factory=Counter)
    computed: Counter[str] = field(default_factory=Counter)
    prompt: int = 0
    last: dict[int, tuple[float, str]] = field(default_factory=dict)
    follow_ups: int = 0
    moved: int = 0

    def add(self, turn: Turn, node: str, found: int) -> None:
        self.requests[node] += 1
        self.prompt += turn.prompt_tokens
        self.computed[node] += turn.prompt_tokens - found
        before = self.last.get(turn.session)
        self.last[turn.session] = (turn.at, node)
        if before is not None:
            self.follow_ups += 1
            self.moved += before[1] != node


def excess(counts: Counter[str], nodes: int) -> float:
    return max(counts.values()) / (counts.total() / nodes) - 1


def simulate(case: Case, turns: list[Turn], seed: int) -> dict[str, object]:
    """An hour under one policy, while no node comes or goes."""
    at_once = sum(turn.prompt_tokens for turn in turns) * (THINK_S + ANSWER_S) / HOUR_S
    cluster = Cluster(case, int(CACHE_HEADROOM * at_once / case.nodes) + 10 * SHARED_TOKENS, seed)
    tally = Tally()
    for turn in turns:
        node = cluster.serve(turn, tally.last.get(turn.session, (0.0, ""))[1])
        tally.add(turn, node, cluster.caches[node].serve(turn))
    return {
        **asdict(case),
        "imbalance": excess(tally.requests, case.nodes),
        "window": statistics.mean(cluster.listener.seen[len(cluster.listener.seen) // 6 :]),
        "computed": excess(tally.computed, case.nodes),
        "found": 1 - tally.computed.total() / tally.prompt,
        "moved": tally.moved / tally.follow_ups,
        "switched": len(cluster.listener.switches),
    }


def changed(case: Case, turns: list[Turn], seed: int) -> dict[str, float]:
    """A node leaves after half an hour and comes back ten minutes later: the share of conversations that went on then and
    moved, each counted once, at its first turn after the change."""
    if case.policy in ("least_loaded", "round_robin"):
        return {}
    cluster = Cluster(case, 0, seed)
    last: dict[int, tuple[float, str]] = {}
    moved: dict[str, list[bool]] = {"leave": [], "join": []}
    events = [(LEAVE_S, "leave", True), (JOIN_S, "join", False)]
    since, kind = math.inf, ""
    for turn in turns:
        if turn.at > JOIN_S + WARM_S:
            break
        if events and turn.at >= events[0][0]:
            since, kind, draining = events.pop(0)
            cluster.drain("node-0", draining)
        before = last.get(turn.session)
        node = cluster.serve(turn, "" if before is None else before[1])
        if kind and before is not None and before[0] < since:
            moved[kind].append(before[1] != node)
        last[turn.session] = (turn.at, node)
    return {name: statistics.mean(found) for name, found in moved.items()}


def measure(case: Case, turns: list[Turn], seed: int) -> dict[str, object]:
    return simulate(case, turns, seed) | changed(case, turns, seed)


def cases(clusters: list[int]) -> Iterator[Case]:
    for nodes in clusters:
        yield Case(nodes, "affinity")
        yield Case(nodes, "affinity", switches=True)
        yield Case(nodes, "bounded")
        yield Case(nodes, "bounded", routers=3)
        yield Case(nodes, "prefix")
        yield Case(nodes, "least_loaded")
        yield Case(nodes, "round_robin")
        for policy in ("affinity", "bounded"):
            yield Case(nodes, policy, key="user")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 100])
    parser.add_argument("--policy", nargs="+", choices=get_args(PolicyName), default=get_args(PolicyName))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    turns = conversations(arguments.sessions, arguments.seed)
    rows = []
    with ProcessPoolExecutor() as pool:
        wanted = [case for case in cases(arguments.nodes) if case.policy in arguments.policy]
        for row in pool.map(partial(measure, turns=turns, seed=arguments.seed), wanted):
            rows.append(row)
            if not arguments.json:
                print(_line(row), flush=True)
    if arguments.json:
        print(json.dumps({"sessions": arguments.sessions, "turns": len(turns), "results": rows}, indent=1))


def _line(row: dict[str, object]) -> str:
    name = f"{row['nodes']:>4} nodes  {row['policy']:<12} {row['key']:<7} {row['routers']} routers"
    figures = ("imbalance", "window", "computed", "found", "moved", "leave", "join")
    return name + "".join(f"  {name} {row.get(name, math.nan):7.2%}" for name in figures) + f"  switched {row['switched']}"


if __name__ == "__main__":
    main()
