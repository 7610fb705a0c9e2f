"""The page for who does not see, does not point, or has a small screen."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.console.browser.browsing import ENDED, ask, entered

from ryzanstein.lab.pages.chromium import Chromium, Page
from ryzanstein.lab.pages.console_process import ConsoleProcess
from ryzanstein.lab.pages.scripted_router import Script

pytestmark = [pytest.mark.lab, pytest.mark.cluster, pytest.mark.timeout(300)]


AXE = Path(__file__).parents[3] / "build/browser/node_modules/axe-core/axe.min.js"
# Everything that axe knows, but what is not of WCAG or best practices for the whole page.
TOLD = "document.getElementById('said').textContent.includes('Answer complete')"
"""The last of an answer is laid out."""
ANSWER = "document.querySelector('.foot a').href.split('/').at(-1)"
VIOLATIONS = """axe.run(document, { resultTypes: ["violations"] }).then(({ violations }) =>
    violations.map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.html.slice(0, 120)).join(" | ")}`))"""
MARKDOWN = [
    ("node-0", "# A head\n\nSome *text* with `code`, a [link](https://a.example/x) and\n\n- a list\n- of two\n\n"),
    ("node-1", "| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint('hello')\n```\n\n> a quote\n\n"),
    ("node-2", "1. one\n2. two\n\n![picture](https://a.example/y.png)\n\n---\n\nThe end."),
]


async def assert_no_violation(page: Page, where: str) -> None:
    assert AXE.exists(), "axe-core is needed: bash .ci/parts browser"
    await page.see(AXE.read_text() + "; 1")
    for scheme in ("light", "dark"):
        await page.scheme(scheme)
        await page.see("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
        assert await page.see(VIOLATIONS) == [], (where, scheme)


async def test_no_page_has_a_violation_in_either_scheme(browser: Chromium, console: ConsoleProcess, script: Script) -> None:
    script.pieces["go"] = MARKDOWN
    page = await entered(browser, console.link)
    await assert_no_violation(page, "an empty chat")
    await ask(page, "go")
    await page.until(f"{ENDED} && {TOLD} && document.querySelectorAll('.chip').length == 3")
    await page.see("for (const each of document.querySelectorAll('details')) each.open = true")
    await assert_no_violation(page, "a coloured answer")
    await page.see("[...document.querySelectorAll('.foot a')].at(-1).click()")
    await page.until("document.querySelectorAll('#answer-parts tbody tr').length == 3")
    await assert_no_violation(page, "an answer's page")
    await page.see("location.hash = '#help'")
    await page.until("!document.getElementById('help').hidden")
    await assert_no_violation(page, "the help")
    await page.see("document.getElementById('logout').click()")
    await page.until("!document.getElementById('login').hidden")
    await assert_no_violation(page, "the login")


async def test_the_page_of_the_cluster_has_no_violation(browser: Chromium, real_console: ConsoleProcess) -> None:
    page = await entered(browser, real_console.link)
    await page.see("location.hash = '#cluster'")
    await page.until("document.querySelectorAll('#charts .chart').length == 4")
    await assert_no_violation(page, "the cluster")


def in_order(nodes: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The roles and names of an accessibility tree, as they are read."""
    by_id = {each["nodeId"]: each for each in nodes}
    waiting, told = [nodes[0]["nodeId"]], []
    while waiting:
        each = by_id[waiting.pop()]
        waiting += reversed([child for child in each.get("childIds", ()) if child in by_id])
        if not each["ignored"]:
            told.append((each["role"]["value"], each.get("name", {}).get("value", "")))
    return told


async def test_what_a_screen_reader_gets_of_a_coloured_answer(
    browser: Chromium, console: ConsoleProcess, script: Script
) -> None:
    script.pieces["go"] = MARKDOWN
    page = await entered(browser, console.link)
    await ask(page, "go")
    await page.until(f"{ENDED} && {TOLD} && document.querySelectorAll('.chip').length == 3")
    told = in_order((await page.call("Accessibility.getFullAXTree"))["nodes"])
    for part in (
        ("region", "Questions and answers"),
        ("article", "Answer"),
        ("heading", "A head"),
        ("link", "link"),
        ("log", "Answer, sentence by sentence"),
        ("button", "Send"),
        ("textbox", "Your question"),
        ("navigation", "Pages"),
        ("main", "Conversation"),
    ):
        assert part in told, part
    texts = [name for role, name in told if role == "StaticText"]
    for each in ("node-0", "node-1, 212 ms", "node-2, 212 ms", "print('hello')", "of two"):
        assert any(each in text for text in texts), each
    assert texts.index("node-1, 212 ms") < next(at for at, text in enumerate(texts) if "print('hello')" in text)
    said = await page.see("[...document.querySelectorAll('#said p')].map((each) => each.textContent)")
    whole = " ".join(said)
    for sentence in ("A head", "of two", "The end.", "Answer complete."):
        assert whole.count(sentence) == 1, (sentence, said)
    assert "212 ms" not in whole, "labels stand in the answer, and are not read in the middle of a sentence"


async def test_it_is_used_at_twice_the_size(browser: Chromium, console: ConsoleProcess, script: Script) -> None:
    """Zoomed to 200 %, a page of 1280 by 1024 pixels has room for 640 by 512."""
    script.pieces["go"] = MARKDOWN
    page = await entered(browser, console.link)
    await page.call("Emulation.setDeviceMetricsOverride", width=640, height=512, deviceScaleFactor=2, mobile=False)
    await ask(page, "go")
    await page.until(ENDED)
    for place in ("#cluster", "#help", f"#{(await page.see('location.hash'))[1:]}"):
        await page.see(f"location.hash = {place!r}")
        await page.until("[...document.querySelectorAll('.page')].filter((each) => !each.hidden).length == 1")
        assert await page.see("document.documentElement.scrollWidth") <= 640, place
    for name in ("question", "send", "retry", "new"):
        await page.see(f"document.getElementById('{name}').scrollIntoView()")
        box = await page.see(f"document.getElementById('{name}').getBoundingClientRect().toJSON()")
        assert 0 <= box["left"] < box["right"] <= 640, name
        assert 0 <= box["top"] < box["bottom"] <= 512, name
    assert await page.see("document.getElementById('turns').clientHeight") > 100, "there is room for an answer"


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
    assert {"to-chat", "Cluster", "Help", "Settings"} <= seen
    await page.until(ENDED)
    await page.until(TOLD)
    for _ in range(60):
        await page.press("Tab")
        if await page.see("document.activeElement.textContent") == "timeline":
            break
    await page.press("Enter")
    await page.until("document.querySelectorAll('#answer-parts tbody tr').length == 1")
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
    for place in ("", "#cluster", "#help", f"#answer/{await page.see(ANSWER)}"):
        await page.see(f"location.hash = {place!r} || location.hash")
        await asyncio.sleep(0.2)
        assert await page.see("document.documentElement.scrollWidth") <= width, place
