"""Measures how long garbage collections stop a router that keeps ended answers, with the interpreter's settings and with ours.

    .venv/bin/python lab/benchmarks/collection.py [--kept 40000] [--answers 60000] [--cycles]

Each setting runs in a process of its own. It keeps so many ended answers of 32 tokens, as for clients that may come back, and
then answers more, each of which takes the place of the oldest that is kept. At last there are 20,000 new objects at once, as
when hundreds of clients come or go. `default`: the interpreter collects when it likes. `calm`: with `CalmCollector` and its
thread, as services. `--cycles`: each answer leaves a cycle of ten objects, as a call of the gRPC library does. Milliseconds of
processor time: the longest collection, all of them, and one of all that is kept.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from ryzanstein.generation.prompts import TextPrompt
from ryzanstein.generation.request import GenerationRequest, SamplingParams
from ryzanstein.generation.tokens import FinishReason, Token
from ryzanstein.process.spare_memory import CalmCollector, SpareMemory
from ryzanstein.router.generations.generation import Generation

TOKENS, BURST = 32, 20_000


class Readers:
    """The observer of a generation that nobody reads."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *what: None


class Cycle:
    """What a call leaves behind: objects that know each other."""

    def __init__(self) -> None:
        self.others = [[self] for _ in range(9)]


def answer(number: int) -> Generation:
    """Returns a generation that has ended."""
    request = GenerationRequest("m", TextPrompt(f"question {number}"), SamplingParams(), session_id=f"s{number}")
    generation = Generation(f"g{number}", request, Readers())  # type: ignore[arg-type]
    generation.start("node", 8)
    generation.log.admit(0)
    for index in range(TOKENS):
        generation.log.append(0, 0, index, Token(index, f" word{number + index}"), "node")
        generation.token_added()
    generation.log.finish(0, 0, FinishReason.STOP)
    generation.end_choice(0)
    generation.settle()
    generation.shrink()
    return generation


class Pauses:
    """The processor time of collections."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self._began = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, facts: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.thread_time()  # no other collection begins before the end of this one
        else:
            self.times_s.append(time.thread_time() - self._began)


def measured(*, calm: bool, kept: int, answers: int, cycles: bool) -> dict[str, float]:
    if calm:
        collector = CalmCollector()
        collector.begin()
        SpareMemory().start(collector)
    retained = deque((answer(number) for number in range(kept)), maxlen=kept)
    pauses = Pauses()
    for number in range(answers):
        retained.append(answer(kept + number))
        if cycles:
            Cycle()
    burst = [[number] for number in range(BURST)]
    longest, total = max(pauses.times_s, default=0.0), sum(pauses.times_s)
    gc.collect()
    assert len(burst) == BURST
    return {"longest": 1e3 * longest, "all of them": 1e3 * total, "one of all": 1e3 * pauses.times_s[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kept", type=int, default=40_000)
    parser.add_argument("--answers", type=int, default=60_000)
    parser.add_argument("--cycles", action="store_true")
    parser.add_argument("--setting", choices=["default", "calm"], help="run only this one, in this process")
    options = parser.parse_args()
    if options.setting:
        calm = options.setting == "calm"
        print(json.dumps(measured(calm=calm, kept=options.kept, answers=options.answers, cycles=options.cycles)))
        return
    again = [sys.executable, "-P", __file__, *sys.argv[1:], "--setting"]
    found = {each: json.loads(subprocess.check_output([*again, each])) for each in ("default", "calm")}
    shown = Table("ms", *found)
    for name in found["default"]:
        shown.add_row(name, *(f"{figures[name]:,.1f}" for figures in found.values()))
    Console(width=80).print(shown)


if __name__ == "__main__":
    main()
