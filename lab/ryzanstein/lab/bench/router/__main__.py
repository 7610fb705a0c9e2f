"""`python -P -m ryzanstein.lab.bench.router`, or `ryzanstein bench router`: the router and proxies.

Exit codes: 0 every answer of every system was complete, 1 some were not or nothing could be
measured.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Annotated

import typer
import uvloop
from rich.console import Console

from ryzanstein.errors import RyzansteinError
from ryzanstein.lab.bench.descriptors import raise_descriptor_limit
from ryzanstein.lab.bench.disturbance import Watch
from ryzanstein.lab.bench.router.document import document, publish
from ryzanstein.lab.bench.router.load.call_end import by_reason, reason_of
from ryzanstein.lab.bench.router.survey import Findings, SurveyPlan, survey
from ryzanstein.lab.bench.router.systems import SYSTEMS

_DEFAULT = SurveyPlan(SYSTEMS, (1, 64, 512), rounds=3, seconds=1.0)


def router(  # noqa: PLR0917 - the command's options
    streams: Annotated[str, typer.Option(help="numbers of concurrent streams, comma-separated")] = "1,64,512",
    seconds: Annotated[float, typer.Option(min=0.1, max=60, help="length of each window")] = _DEFAULT.seconds,
    rounds: Annotated[int, typer.Option(min=1, max=50, help="windows per system and number of streams")] = _DEFAULT.rounds,
    systems: Annotated[str, typer.Option(help=f"any of {', '.join(SYSTEMS)}")] = ",".join(SYSTEMS),
    first_tokens: Annotated[
        int, typer.Option(min=0, max=10**6, help="single answers per round; 0: none")
    ] = _DEFAULT.first_tokens,
    idle: Annotated[int, typer.Option(min=0, max=8000, help="idle connections to measure memory; 0: none")] = _DEFAULT.idle,
    active: Annotated[int, typer.Option(min=0, max=4000, help="streams to measure memory; 0: none")] = _DEFAULT.active,
    many: Annotated[int, typer.Option(min=0, max=4000, help="streams that are opened at once; 0: none")] = _DEFAULT.many,
    many_tokens: Annotated[int, typer.Option(min=1, max=10**6, help="per stream, one every 0.25 s")] = _DEFAULT.many_tokens,
    slow: Annotated[int, typer.Option(min=0, max=1000, help="clients that do not read; 0: none")] = _DEFAULT.slow,
    slow_tokens: Annotated[int, typer.Option(min=1, max=10**9, help="for each such client")] = _DEFAULT.slow_tokens,
    json_path: Annotated[str, typer.Option("--json", help="write JSON to this file; - is standard output")] = "",
) -> None:
    """Compare the router with nginx, haproxy, envoy and direct connections, in front of one scripted node."""
    raise_descriptor_limit()
    people = Console(stderr=True, highlight=False)
    watch = Watch()
    try:
        levels = tuple(int(level) for level in _names("streams", streams, None))
        chosen = tuple(_names("systems", systems, SYSTEMS))
        plan = SurveyPlan(chosen, levels, rounds, seconds, first_tokens, idle, active, many, many_tokens, slow, slow_tokens)
        findings = uvloop.run(_until_terminated(survey(plan, people)))
    except asyncio.CancelledError:
        raise typer.Exit(128 + signal.SIGTERM) from None
    except RyzansteinError as error:
        people.print(f"error {error.code.name} ({error.reason}): {error.message}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    seen = watch.stop()
    publish(document(plan, findings) | {"disturbance": seen.document()}, json_path)
    people.print(str(seen), markup=False)
    for name, reason in findings.absent.items():
        people.print(f"{name} was not measured: {reason}", markup=False)
    problems = list(findings.problems())
    for name in plan.systems:
        own = [problem for system, problem in problems if system == name]
        for reason, count in by_reason(own).items():
            sample = next(problem for problem in own if reason_of(problem) == reason)
            people.print(f"{name}: {count} answers, {sample}", markup=False)
    if problems or not findings.long:
        raise typer.Exit(1)


async def _until_terminated(work: Coroutine[None, None, Findings]) -> Findings:
    """Runs the work. SIGTERM cancels it, so that what was started is stopped."""
    task = asyncio.create_task(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def _names(option: str, text: str, known: tuple[str, ...] | None) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    bad = [
        name
        for name in names
        if (name not in known if known is not None else not name.isdecimal() or not 0 < int(name) <= 4000)
    ]
    if bad or not names:
        what = f"any of {', '.join(known)}" if known else "numbers from 1 to 4000"
        raise typer.BadParameter(f"must be {what}: {text!r}", param_hint=f"--{option}")
    return names


if __name__ == "__main__":
    typer.run(router)
