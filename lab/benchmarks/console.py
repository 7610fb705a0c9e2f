"""What the console costs, in a real Chromium: first paint, a token's way to the page, memory, hostile text.

`bash .ci/parts browser`, then `.venv/bin/python lab/benchmarks/console.py [--runs N] [--tabs N] [--seconds S] [--json FILE]`.
A scripted router answers over a real connection; its tokens are 5 bytes. Beside the console's page stands an empty one of the
same server, so that what the browser and the machine take is seen apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import psutil

from ryzanstein.lab.machine import cpu
from ryzanstein.lab.pages.chromium import Page, chromium
from ryzanstein.lab.pages.console_process import ConsoleProcess
from ryzanstein.lab.pages.hostile import HOSTILE, pieces_of
from ryzanstein.lab.pages.scripted_router import Script, ScriptedRouter

RATE = 100
HUGE = 10**6
PARAGRAPH = f"Paragraph. {'word ' * 97}\n\n"
CONNECTED = "document.getElementById('connection').textContent == 'connected'"
ENDED = "document.querySelector('.answer') && !document.querySelector('.answer.streaming')"
PAINT = """({paint: performance.getEntriesByName('first-contentful-paint')[0].startTime,
    html: performance.getEntriesByType('navigation')[0].responseEnd,
    requests: performance.getEntriesByType('resource').length + 1,
    bytes: [...performance.getEntriesByType('resource'), ...performance.getEntriesByType('navigation')]
        .reduce((sum, each) => sum + each.decodedBodySize, 0)})"""
# Notes when each number of an answer stands on the page, after it has been painted.
SHOWN = """window.shown = {}; (() => {
    let behind = -1;
    const look = () => {
        const text = [...document.querySelectorAll('.answer .body')].at(-1)?.textContent ?? '';
        const last = Number(text.trim().split(/\\s+/).at(-1));
        if (last > behind) { const at = Date.now(); while (behind < last) window.shown[++behind] = at; }
        requestAnimationFrame(look);
    };
    look();
})()"""


def at_share(values: Sequence[float], share: float) -> float:
    """Returns the value below which this share lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("nan")


@asynccontextmanager
async def opened(console: ConsoleProcess) -> AsyncIterator[Page]:
    """A page that is logged in, in a browser of its own."""
    async with chromium() as browser:
        page = await browser.page()
        await page.size(1100, 760)
        await page.go(await asyncio.to_thread(console.another_link))
        await page.until(CONNECTED)
        yield page


async def first_paints(console: ConsoleProcess, runs: int) -> dict[str, Any]:
    """Returns milliseconds from the beginning of the navigation, each of a browser that was just started."""
    found: dict[str, list[dict[str, float]]] = {"console": [], "empty": []}
    for _ in range(runs):
        for kind, paints in found.items():
            async with chromium() as browser:
                page = await browser.page()
                await page.size(1100, 760)
                await page.go(console.link.partition("#")[0] + ("" if kind == "console" else "static/icon.svg"))
                await page.until("performance.getEntriesByName('first-contentful-paint').length", 20)
                paints.append(await page.see(PAINT))
    last = found["console"][-1]
    return {
        "median_ms": round(statistics.median(each["paint"] for each in found["console"])),
        "first_paint_ms": [round(each["paint"]) for each in found["console"]],
        "first_paint_of_a_picture_ms": [round(each["paint"]) for each in found["empty"]],
        "html_ms": [round(each["html"]) for each in found["console"]],
        "requests": last["requests"],
        "bytes": last["bytes"],
    }


async def ask(page: Page, text: str) -> None:
    await page.until("document.activeElement.id == 'question'")
    await page.type(text)
    await page.press("Enter")


async def tokens_to_pages(console: ConsoleProcess, script: Script, tabs: int, seconds: float) -> dict[str, Any]:
    """Returns how late tokens stand on the pages of so many tabs, each with an answer of its own at RATE tokens a second."""
    number = int(seconds * RATE)
    script.step_s, script.sent_of = 1 / RATE, {}
    process = psutil.Process(console.process.pid)
    async with chromium() as browser:
        pages = [await browser.page() for _ in range(tabs)]
        for at, page in enumerate(pages):
            script.pieces[f"go {at}"] = [("node-0", f"{token} ") for token in range(number)]
            await page.size(900, 600)
            await page.go(await asyncio.to_thread(console.another_link))
            await page.until(CONNECTED)
            await page.see(SHOWN)
        before, began = process.cpu_times(), time.monotonic()
        await asyncio.gather(*(ask(page, f"go {at}") for at, page in enumerate(pages)))
        for page in pages:
            await page.until(ENDED, seconds * 30 + 60)
        spent, took = process.cpu_times(), time.monotonic() - began
        late = [each for at, page in enumerate(pages) for each in await _late(page, script.sent_of[f"go {at}"])]
    used = spent.user + spent.system - before.user - before.system
    return {
        "tabs": tabs,
        "tokens": number * tabs,
        "p50_ms": round(at_share(late, 0.5)),
        "p95_ms": round(at_share(late, 0.95)),
        "console_core_share": round(used / took, 3),
        "console_rss_mb": round(process.memory_info().rss / 1e6, 1),
        "seconds": round(took, 1),
    }


async def _late(page: Page, sent: dict[int, float]) -> list[float]:
    shown = await page.see("window.shown")
    return [at - 1e3 * sent[int(token)] for token, at in shown.items() if int(token) in sent]


async def huge_answer(console: ConsoleProcess, script: Script) -> dict[str, Any]:
    """Returns what a page has in memory after a million characters, and how long it takes to type a letter then."""
    script.step_s = 0.0
    script.pieces["huge"] = [("node-0", PARAGRAPH)] * (HUGE // len(PARAGRAPH) + 1)
    async with opened(console) as page:
        await ask(page, "huge")
        await page.until(ENDED, 300)
        await page.call("HeapProfiler.collectGarbage")
        heap = await page.see("performance.memory.usedJSHeapSize")
        answers = [await _answers_in_ms(page) for _ in range(20)]
    rss = psutil.Process(console.process.pid).memory_info().rss
    return {
        "characters": HUGE,
        "tab_heap_mb": round(heap / 1e6, 1),
        "page_answers_p95_ms": round(at_share(answers, 0.95)),
        "console_rss_mb": round(rss / 1e6, 1),
    }


async def _answers_in_ms(page: Page) -> float:
    """Returns how long a letter takes until it is painted."""
    began = time.monotonic()
    await page.type("x")
    await page.see("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    return (time.monotonic() - began) * 1e3


async def hostile_texts(console: ConsoleProcess, script: Script) -> dict[str, Any]:
    """Returns how late the console's event loop was, at worst, and how long a letter took while each text came."""
    script.step_s = 0.002
    await asyncio.sleep(5)
    told: dict[str, Any] = {"idle_loop_lag_worst_ms": _worst_lag_ms(console)}
    async with opened(console) as page:
        idle = [await _answers_in_ms(page) for _ in range(30)]
        told["idle"] = {"p50_ms": round(at_share(idle, 0.5)), "worst_ms": round(max(idle)), "letters": len(idle)}
        await page.see("document.getElementById('question').value = ''")
        for name, text in HOSTILE.items():
            script.pieces[name] = pieces_of(text, 400 if len(text) < 100_000 else 4_000)
            before = _cpu_s(console)
            await ask(page, name)
            letters: list[float] = []
            while not letters or not await page.see(f"Boolean({ENDED})"):
                letters.append(await _answers_in_ms(page))
                await asyncio.sleep(0.02)
            await page.see("document.getElementById('question').value = ''")
            used = [round((after - was) * 1e3) for after, was in zip(_cpu_s(console), before, strict=True)]
            told[name] = {"p50_ms": round(at_share(letters, 0.5)), "worst_ms": round(max(letters)), "letters": len(letters)}
            told[name] |= {"console_cpu_ms": used[0], "browser_cpu_ms": used[1]}
        told["loop_lag_worst_ms"] = _worst_lag_ms(console)
        told["violations"] = await page.violations
        told["ran"] = await page.see("window.pwned ?? null")
        own = console.url.partition("//")[2].rstrip("/")
        told["foreign_requests"] = [url for url in page.requests if own not in url and url != "about:blank"]
    return told


def _cpu_s(console: ConsoleProcess) -> tuple[float, float]:
    """Returns what the console and the browser have used of processors until now."""
    browser = [each for each in psutil.Process().children(recursive=True) if each.name().startswith("chrom")]
    return _used_s([psutil.Process(console.process.pid)]), _used_s(browser)


def _used_s(processes: Sequence[psutil.Process]) -> float:
    times = [each.cpu_times() for each in processes]
    return sum(each.user + each.system for each in times)


def _worst_lag_ms(console: ConsoleProcess) -> float:
    """Returns the largest lag of the console's event loop since its start."""
    name = "ryzanstein_console_loop_lag_worst_seconds "
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    page = direct.open(console.metrics_url, timeout=10).read().decode()
    return round(float(next(line for line in page.splitlines() if line.startswith(name)).removeprefix(name)) * 1e3, 1)


async def measured(runs: int, tabs: Sequence[int], seconds: float) -> dict[str, Any]:
    script = Script()
    told: dict[str, Any] = {}

    def tell(name: str, figures: Any) -> None:
        told[name] = figures
        print(json.dumps({name: figures}), flush=True)  # what comes later may fail on a machine that is busy

    tell("processor", {"name": cpu(), "load": os.getloadavg()})
    with closing(ScriptedRouter(script)) as router:
        with a_console(router) as console:
            tell("hostile", await hostile_texts(console, script))
        with a_console(router) as console:
            tell("paint", await first_paints(console, runs))
            tell("huge", await huge_answer(console, script))
            for each in tabs:
                tell(f"tabs_{each}", await tokens_to_pages(console, script, each, seconds))
    return told


@contextmanager
def a_console(router: ScriptedRouter) -> Iterator[ConsoleProcess]:
    with tempfile.TemporaryDirectory() as folder:
        console = ConsoleProcess(Path(folder), router.address)
        try:
            yield console
        finally:
            console.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="browsers that are started for the first paint")
    parser.add_argument("--tabs", type=int, nargs="*", default=[1, 20])
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each answer is")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    told = asyncio.run(measured(options.runs, options.tabs, options.seconds))
    if options.json:
        options.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
