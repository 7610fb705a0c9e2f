"""Hostile and huge text in a real Chromium."""

from __future__ import annotations

import pytest
from tests.console.browser.browsing import ENDED, FOREIGN, ask, assert_calm, entered, text_of

from ryzanstein.lab.pages.chromium import Chromium
from ryzanstein.lab.pages.console_process import ConsoleProcess
from ryzanstein.lab.pages.hostile import HOSTILE, pieces_of
from ryzanstein.lab.pages.scripted_router import Script

pytestmark = [pytest.mark.lab, pytest.mark.cluster, pytest.mark.timeout(300)]


async def test_hostile_text_runs_nothing_reaches_nobody_and_holds_nothing_up(
    browser: Chromium, console: ConsoleProcess, script: Script
) -> None:
    for name, text in HOSTILE.items():
        script.pieces[name] = pieces_of(text, 400 if len(text) < 100_000 else 20_000)
    page = await entered(browser, console.link)
    for number, name in enumerate(HOSTILE, 1):
        await ask(page, name)
        await page.until(f"document.querySelectorAll('.answer').length == {number}")
        await page.until(ENDED, 60)
    assert await page.see("window.pwned") is None
    links = await page.see("[...document.querySelectorAll('.answer .body a')].map((a) => [a.protocol, a.host, a.rel])")
    rel = "noopener noreferrer nofollow"
    assert links == [["http:", "evil.example", rel], ["https:", "ok.example", rel]]
    assert await page.see(f"document.querySelectorAll('{FOREIGN}').length") == 0
    shown = await page.see("document.body.innerText")
    assert not any(character in shown for character in "\u202e\u2066\x1b\ufdd0")
    await page.type("still here")
    assert await page.see("document.getElementById('question').value") == "still here"
    await assert_calm(page, console)


async def test_a_million_characters_leave_the_page_usable(browser: Chromium, console: ConsoleProcess, script: Script) -> None:
    script.pieces["go"] = [("node-0", f"Paragraph {number}. {'word ' * 98}\n\n") for number in range(2000)]
    page = await entered(browser, console.link)
    await ask(page, "go")
    await page.until(ENDED, 120)
    await page.until("document.querySelectorAll('.answer .block').length == 2000", 120)
    assert (await text_of(page, console)).count("word ") == 2000 * 97  # the last one of a paragraph has no space
    await page.type("still here")
    assert await page.see("document.getElementById('question').value") == "still here"
    await page.call("HeapProfiler.collectGarbage")
    assert await page.see("performance.memory.usedJSHeapSize") < 60e6
