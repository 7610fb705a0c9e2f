"""The command: one seed with its details, or fresh seeds for a number of minutes."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from ryzanstein.lab.simulation.machine.clock import real_monotonic
from ryzanstein.lab.simulation.planning.drawing import plan
from ryzanstein.lab.simulation.planning.plan import LEADERS_FROM, MODELS_FROM, WIDE_FROM, SimulationPlan
from ryzanstein.lab.simulation.record import dump
from ryzanstein.lab.simulation.simulation import SimulationOutcome, simulate
from ryzanstein.process.allotment import whole_cores


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if any((options.nodes, options.routers, options.duration)) and (options.seed or 0) < WIDE_FROM:
        parser.error(f"--nodes, --routers and --duration need a --seed from {WIDE_FROM} on")
    if options.seed is not None:
        return _replay(options)
    if options.minutes is None and options.count is None:
        parser.error("one of --seed, --minutes and --count is required")
    return _explore(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ryzanstein simulate", description="Simulate whole clusters, one per seed.")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seed", type=_whole(0, 2**63 - 1), help="replay this seed")
    what.add_argument("--minutes", type=_minutes, help="run new seeds for this many minutes of real time")
    parser.add_argument("--first", type=_whole(0, 2**62), help="the first of the new seeds; default: random")
    parser.add_argument("--count", type=_whole(1, 10**9), help="run this many new seeds, however long they take")
    parser.add_argument("--jobs", type=_whole(1, 1024), default=whole_cores(), help="number of processes")
    parser.add_argument("--log", action="store_true", help="with --seed: print all events")
    parser.add_argument("--smaller", action="store_true", help="with --seed: leave out faults and clients that do not matter")
    parser.add_argument("--without-faults", type=_numbers, default="", help="with --seed: faults to leave out, e.g. 0,3")
    parser.add_argument("--without-clients", type=_numbers, default="", help="with --seed: clients to leave out, e.g. 0,3")
    parser.add_argument("--nodes", type=_whole(2, 10_000), default=0, help=f"with --seed from {WIDE_FROM} on: number of nodes")
    parser.add_argument("--routers", type=_whole(1, 100), default=0, help="with such a seed: number of routers")
    parser.add_argument("--duration", type=_whole(30, 86_400), default=0, help="with such a seed: simulated seconds")
    parser.add_argument("--json", type=Path, help="write the results as JSON to this file")
    return parser


def _replay(options: argparse.Namespace) -> int:
    leave = {"faults": options.without_faults, "clients": options.without_clients}
    planned = plan(options.seed, options.nodes, options.routers, options.duration).without(**leave)
    outcome = simulate(planned)
    if options.smaller and outcome.violations:
        outcome = _smaller(outcome)
    _describe(outcome.plan)
    if options.log:
        print(dump(outcome.record.lines))
    _tell(outcome)
    if options.json:
        options.json.write_text(json.dumps(_document([outcome])))
    return 1 if outcome.violations else 0


def _whole(low: int, high: int) -> Callable[[str], int]:
    """Returns a parser for whole numbers from `low` to `high`."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and low <= int(text[:20]) <= high):
            raise argparse.ArgumentTypeError(f"must be a whole number from {low} to {high}, got {text[:40]!r}")
        return int(text)

    return read


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes <= 100_000:
        raise argparse.ArgumentTypeError(f"must be more than 0 and at most 100000, got {text[:40]!r}")
    return minutes


def _numbers(text: str) -> frozenset[int]:
    """Returns the comma-separated numbers; an empty set for an empty text."""
    return frozenset(map(_whole(0, 10**9), filter(None, text.split(","))))


def _smaller(outcome: SimulationOutcome) -> SimulationOutcome:
    """Returns an outcome that breaks the same promise with fewer faults and clients.

    It leaves out halves first, then one at a time.
    """
    promise = outcome.violations[0].failure
    for part in ("faults", "clients"):
        size = max(1, len(getattr(outcome.plan, part)) // 2)
        while size:
            numbers = [each.number for each in getattr(outcome.plan, part)]
            for start in range(0, len(numbers), size):
                tried = outcome.plan.without(**{part: frozenset(numbers[start : start + size])})
                again = simulate(tried)
                if any(violation.failure is promise for violation in again.violations):
                    outcome = again
            size //= 2
    return outcome


def _describe(planned: SimulationPlan) -> None:
    for name, value in vars_of(planned).items():
        if isinstance(value, tuple) and value and not isinstance(value[0], tuple):
            print(f"{name}:")
            for each, alike in itertools.groupby(value):
                number = sum(1 for _ in alike)
                print(f"  {each}" if number == 1 else f"  {number} x {each}")
        else:
            print(f"{name}: {value}")


def vars_of(planned: SimulationPlan) -> dict[str, object]:
    return {name: getattr(planned, name) for name in SimulationPlan.__dataclass_fields__}


def _tell(outcome: SimulationOutcome) -> None:
    tally = outcome.tally
    print(
        f"seed {outcome.plan.seed}: {outcome.simulated_s:.0f} s simulated in {outcome.processor_s:.1f} s of processor time"
        f" ({outcome.simulated_s / max(outcome.processor_s, 1e-9):.0f}x), {tally.complete} answers complete,"
        f" {tally.tokens} tokens, digest {outcome.digest}"
    )
    print("outcomes: " + ", ".join(f"{name} {count}" for name, count in sorted(tally.by_outcome.items())))
    print("reached: " + ", ".join(f"{name} {count}" for name, count in sorted(outcome.reached.items())))
    for name, value in outcome.figures.items():
        print(f"{name}: {value}")
    for violation in outcome.violations:
        print(f"VIOLATION {violation}")


def _explore(options: argparse.Namespace) -> int:
    """Runs each seed in a separate process, so that one cannot affect the next."""
    first = options.first if options.first is not None else MODELS_FROM + random.SystemRandom().randrange(4 * 10**9)
    until = math.inf if options.minutes is None else real_monotonic() + 60 * options.minutes
    seeds = itertools.islice(itertools.count(first) if options.first is not None else _mixed(first), options.count)
    results, failing = [], []
    with ThreadPoolExecutor(options.jobs) as pool:
        running = {pool.submit(_run, seed) for seed in itertools.islice(seeds, options.jobs)}
        while running:
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            more = itertools.islice(seeds, len(ended) if real_monotonic() < until else 0)
            running |= {pool.submit(_run, seed) for seed in more}
            for seed, result in (run.result() for run in ended):
                if result is None or result["violations"]:
                    failing.append(seed)
                    print(f"seed {seed}: {'failed to run' if result is None else result['violations'][0]}", flush=True)
                if result is not None:
                    results.append(result)
    _sum_up(results, failing, first)
    if options.json:
        options.json.write_text(json.dumps({"results": results, "failing": failing}))
    return 1 if failing else 0


def _mixed(first: int) -> Iterator[int]:
    """Yields new seeds from the first on; every fourth one has several orchestrators, every 32nd one many nodes."""
    for number in itertools.count(first):
        if (number - first) % 32 == 1:
            yield WIDE_FROM + number
        else:
            yield number if (number - first) % 4 else LEADERS_FROM + number % (WIDE_FROM - LEADERS_FROM)


def _run(seed: int) -> tuple[int, dict[str, Any] | None]:
    """Returns the seed with its result, or None if it failed to run."""
    command = [sys.executable, "-P", "-m", "ryzanstein.lab.simulation.one", str(seed)]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONHASHSEED": "0"}, check=False)
    lines = child.stdout.splitlines()
    return seed, json.loads(lines[-1]) if child.returncode in (0, 1) and lines else None


def _sum_up(results: list[dict[str, Any]], failing: list[int], first: int) -> None:
    simulated_s = sum(result["simulated_s"] for result in results)
    processor_s = sum(result["processor_s"] for result in results)
    reached: Counter[str] = Counter()
    for result in results:
        reached.update(result["reached"])
    print(f"{len(results)} seeds from {first}: {simulated_s / 3600:.1f} simulated hours, {processor_s:.0f} s of processor time")
    print("reached: " + ", ".join(f"{name} {count}" for name, count in sorted(reached.items())))
    print(f"violations in {len(failing)} seeds: {' '.join(map(str, failing))}" if failing else "no violation")


def document(outcome: SimulationOutcome) -> dict[str, object]:
    """Returns one seed's result."""
    return {
        "seed": outcome.plan.seed,
        "simulated_s": outcome.simulated_s,
        "processor_s": outcome.processor_s,
        "callbacks": outcome.callbacks,
        "digest": outcome.digest,
        "complete": outcome.tally.complete,
        "tokens": outcome.tally.tokens,
        "outcomes": outcome.tally.by_outcome,
        "reached": outcome.reached,
        "figures": outcome.figures,
        "violations": [str(violation) for violation in outcome.violations],
    }


def _document(outcomes: list[SimulationOutcome]) -> dict[str, object]:
    return {"results": [document(outcome) for outcome in outcomes]}
