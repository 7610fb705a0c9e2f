"""Hostile and huge text in a real Chromium."""

from __future__ import annotations

import pytest
from tests.console.browser.browsing import ENDED, FOREIGN, ask, assert_calm, entered, text_of

from ryzanstein.lab.pages.chromium import Chromium
from ryzanstein.lab.pages.console_process import ConsoleProcess
from ryzanstein.lab.pages.scripted_router import Script

pytestmark = [pytest.mark.lab, pytest.mark.cluster, pytest.mark.timeout(300)]

HOSTILE = {
    "script": "<script>window.pwned = 1</script> <img src=x onerror='window.pwned = 1'> <svg onload='window.pwned = 1'>",
    "links": (
        "[a](javascript:window.pwned=1) [b](data:text/html,<script>window.pwned=1</script>) [c](JaVaScRiPt:window.pwned=1)\n"
        "[d](&#106;avascript:window.pwned=1) <javascript:window.pwned=1> [e](//evil.example/x) [f](file:///etc/passwd)\n\n"
        "![g](http://evil.example/secret.png) ![h](data:image/svg+xml,<svg/onload=window.pwned=1>) [i](https://ok.example/x)"
    ),
    "brackets": "[" * 20_000,
    "delimiters": "*_`~" * 5_000 + "\n\n" + "> " * 4_000 + "\n\n" + "- " * 4_000,
    "bidi": "user \u202egnp.exe\u202c \u2066abc\u2069 \x1b[2J\x07 \ufdd0 seam \ufdd0",
    "fences": "before\n\n```html\n<b>open</b>\n\n~~~\n" + "x\n" * 3000,
    "table": "|a|b|\n|-|-|\n" + "|<b>x</b>|y|\n" * 500,
    "style": (
        "<style>*{display:none}</style><base href='http://evil.example/'><meta http-equiv=refresh content='0;//evil.example'>"
    ),
    "form": "<form action=http://evil.example><input name=x></form><iframe src=http://evil.example></iframe>",
}


async def test_hostile_text_runs_nothing_reaches_nobody_and_holds_nothing_up(
    browser: Chromium, console: ConsoleProcess, script: Script
) -> None:
    for name, text in HOSTILE.items():
        script.pieces[name] = [
            (f"node-{at % 3}", text[begin : begin + 400]) for at, begin in enumerate(range(0, len(text), 400))
        ]
    page = await entered(browser, console.link)
    for number, name in enumerate(HOSTILE, 1):
        await ask(page, name)
        await page.until(f"document.querySelectorAll('.answer').length == {number}")
        await page.until(ENDED, 60)
    assert await page.see("window.pwned") is None
    links = await page.see("[...document.querySelectorAll('.answer a')].map((a) => [a.protocol, a.host, a.rel])")
    rel = "noopener noreferrer nofollow"
    assert links == [["http:", "evil.example", rel], ["https:", "ok.example", rel]]
    assert await page.see(f"document.querySelectorAll('{FOREIGN}').length") == 0
    shown = await page.see("document.body.innerText")
    assert not any(character in shown for character in "\u202e\u2066\x1b\ufdd0")
    began = await page.see("performance.now()")
    await page.see("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    assert await page.see("performance.now()") - began < 500
    await assert_calm(page, console)


async def test_a_million_characters_leave_the_page_usable(browser: Chromium, console: ConsoleProcess, script: Script) -> None:
    script.pieces["go"] = [("node-0", f"Paragraph {number}. {'word ' * 98}\n\n") for number in range(2000)]
    page = await entered(browser, console.link)
    await ask(page, "go")
    await page.until(ENDED, 120)
    await page.until("document.querySelectorAll('.answer .block').length == 2000", 120)
    assert (await text_of(page, console)).count("word ") == 2000 * 97  # the last one of a paragraph has no space
    began = await page.see("performance.now()")
    await page.type("still here")
    await page.see("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    assert await page.see("performance.now()") - began < 500
    await page.call("HeapProfiler.collectGarbage")
    assert await page.see("performance.memory.usedJSHeapSize") < 60e6
