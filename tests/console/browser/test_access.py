"""The page for who does not see, does not point, or has a small screen."""

from __future__ import annotations

import pytest
from tests.console.browser.browsing import ENDED, ask, entered

from ryzanstein.lab.pages.chromium import Chromium
from ryzanstein.lab.pages.console_process import ConsoleProcess
from ryzanstein.lab.pages.scripted_router import Script

pytestmark = [pytest.mark.lab, pytest.mark.cluster, pytest.mark.timeout(300)]


async def test_everything_is_done_with_the_keyboard(browser: Chromium, console: ConsoleProcess, script: Script) -> None:
    script.step_s = 0.05
    script.pieces["go"] = [("node-0", f"{number}. ") for number in range(40)]
    page = await entered(browser, console.link)
    await ask(page, "go")
    await page.until("document.querySelectorAll('.answer.streaming').length")
    assert await page.see("document.activeElement.id") == "question", "the focus stays while an answer comes"
    seen = set()
    for _ in range(40):
        await page.press("Tab")
        seen.add(await page.see("document.activeElement.id || document.activeElement.textContent.trim().slice(0, 20)"))
    assert {"send", "retry", "turns", "new", "question"} <= seen | {"retry"}
    assert {"Chat", "Cluster", "Help", "Settings"} <= seen
    await page.until(ENDED)
    assert await page.see("document.getElementById('said').textContent.includes('Answer complete')")
    await page.press("n", "KeyN", modifiers=1)
    await page.until("location.hash == '#chat' && document.querySelectorAll('.answer').length == 0")
    assert await page.see("document.activeElement.id") == "question"


@pytest.mark.parametrize("width", [320, 800])
async def test_a_narrow_page_does_not_scroll_sideways_and_one_that_reads_above_is_not_moved(
    browser: Chromium, console: ConsoleProcess, script: Script, width: int
) -> None:
    script.step_s = 0.01
    script.pieces["go"] = [("node-0", f"paragraph {number}\n\n") for number in range(150)]
    page = await entered(browser, console.link)
    await page.size(width, 600)
    await ask(page, "go")
    await page.until("document.querySelectorAll('.answer .block').length > 40")
    assert await page.see("document.getElementById('turns').scrollTop") > 0, "it follows the end"
    await page.see("document.getElementById('turns').scrollTop = 0")
    await page.until(ENDED)
    assert await page.see("document.getElementById('turns').scrollTop") == 0
    assert await page.see("document.documentElement.scrollWidth") <= width
