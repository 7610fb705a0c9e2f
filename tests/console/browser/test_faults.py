"""Faults in the middle of an answer, seen in a real Chromium: the text is that of an undisturbed answer."""

from __future__ import annotations

import asyncio
import signal

import pytest
from tests.console.browser.browsing import (
    ENDED,
    QUESTION,
    ROWS,
    ask,
    assert_calm,
    entered,
    nodes_of,
    picture,
    serving,
    set_long,
    text_of,
    undisturbed,
    words,
)

from ryzanstein.cli.processes.cluster import LocalCluster
from ryzanstein.lab.pages.chromium import Chromium
from ryzanstein.lab.pages.console_process import ConsoleProcess
from ryzanstein.lab.pages.scripted_router import Script

pytestmark = [pytest.mark.lab, pytest.mark.cluster, pytest.mark.timeout(300)]


async def test_a_node_is_killed_in_the_middle_of_an_answer(
    browser: Chromium, real_console: ConsoleProcess, cluster: LocalCluster
) -> None:
    page = await entered(browser, real_console.link)
    await set_long(page)
    found = asyncio.create_task(serving(cluster))
    await ask(page, QUESTION)
    _, victim = await found
    cluster.kill(victim)
    await page.until(ENDED)
    first, second = await nodes_of(page)
    assert first == victim
    assert second.split(", ")[0] != victim
    assert second.endswith(" ms")
    colours = await page.see(
        "[...new Set([...document.querySelectorAll('.moved .part')].map((each) => getComputedStyle(each).color))]"
    )
    lines = await page.see(
        "[...new Set([...document.querySelectorAll('.moved .part')].map((each) => getComputedStyle(each).textDecorationStyle))]"
    )
    assert (len(colours), len(lines)) == (2, 2)
    cells = await page.see(ROWS)
    assert [row[0] for row in cells] == [victim, second.split(", ")[0]]
    assert cells[1][2].endswith(" ms")
    assert cells[1][3]
    seen = await text_of(page, real_console)
    await page.see("document.querySelector('.answer details').open = true; document.querySelector('#turns').scrollTop = 1e6")
    await picture(page, "console.png")
    await page.see("[...document.querySelectorAll('.answer .foot a')].find((a) => a.textContent == 'timeline').click()")
    await page.until("document.querySelectorAll('#answer-parts tbody tr').length == 2")
    told = await page.see("document.querySelector('#answer-timeline svg').getAttribute('aria-label')")
    silence = cells[1][2].removesuffix(" ms")
    assert f"1 move: {silence} ms of silence" in told
    rows = await page.see(
        "[...document.querySelectorAll('#answer-parts tbody tr')].map((tr) => [...tr.cells].map((td) => td.textContent))"
    )
    assert [row[0] for row in rows] == [victim, second.split(", ")[0]]
    assert rows[1][1] == rows[0][2], "the second part begins where the first ended"
    assert (rows[1][5], bool(rows[1][6])) == (f"{silence} ms", True)
    assert await page.see("document.querySelectorAll('#answer-timeline .band').length") == 1
    assert QUESTION in await page.see("document.getElementById('answer-facts').innerText")
    await picture(page, "console-answer.png")
    await page.see("document.querySelector('#answer-facts a').click()")
    await page.until("!document.getElementById('chat').hidden")
    await assert_calm(page, real_console)
    cluster.restart(victim)
    cluster.wait_nodes(3)
    assert words(seen) == words(await undisturbed(cluster, QUESTION, max_tokens=500))


async def test_the_router_is_killed_in_the_middle_of_an_answer(
    browser: Chromium, real_console: ConsoleProcess, cluster: LocalCluster
) -> None:
    page = await entered(browser, real_console.link)
    await set_long(page)
    found = asyncio.create_task(serving(cluster))
    await ask(page, QUESTION)
    victim, _ = await found
    cluster.kill(victim)
    await page.until(ENDED)
    assert "re-attached 1x" in await page.see("document.querySelector('.answer .foot').innerText")
    seen = await text_of(page, real_console)
    cluster.restart(victim)
    cluster.wait_nodes(3)
    assert words(seen) == words(await undisturbed(cluster, QUESTION, max_tokens=500))
    await assert_calm(page, real_console)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_the_console_is_restarted_in_the_middle_of_an_answer(
    browser: Chromium, real_console: ConsoleProcess, cluster: LocalCluster, number: signal.Signals
) -> None:
    """The page that is open goes on by itself: with the same login, the same text, and the same colours."""
    page = await entered(browser, real_console.link)
    await set_long(page)
    found = asyncio.create_task(serving(cluster))
    await ask(page, QUESTION)
    _, node = await found
    await asyncio.to_thread(real_console.stop, number)
    await page.until("document.getElementById('connection').textContent != 'connected'")
    await asyncio.to_thread(real_console.start)
    await page.until("document.getElementById('connection').textContent == 'connected'")
    # A console that stops says first that the answer goes on in the cluster.
    await page.until(f"document.querySelectorAll('.answer').length == 1 && {ENDED} && !document.querySelector('.failed')", 60)
    assert await page.see("document.querySelector('.question').textContent") == QUESTION
    assert await nodes_of(page) == [node]
    assert words(await text_of(page, real_console)) == words(await undisturbed(cluster, QUESTION, max_tokens=500))
    await ask(page, "And again?")
    await page.until(f"document.querySelectorAll('.answer').length == 2 && {ENDED}", 60)
    await assert_calm(page, real_console)


async def test_an_answer_that_ended_while_no_console_ran_is_shown_without_colours_and_says_so(
    browser: Chromium, console: ConsoleProcess, script: Script
) -> None:
    page = await entered(browser, console.link)
    await ask(page, "one two three")
    await page.until(ENDED)
    console.stop()
    await page.until("document.getElementById('connection').textContent != 'connected'")
    console.start()
    await page.until("document.querySelectorAll('.answer.uncoloured').length", 60)
    assert await text_of(page, console) == "onetwothree"
    assert "not known any more" in await page.see("document.querySelector('.answer').innerText")
    assert await page.see("document.querySelectorAll('#session-list a').length") == 1


async def test_a_person_who_is_offline_for_a_while_gets_the_rest(
    browser: Chromium, console: ConsoleProcess, script: Script
) -> None:
    numbers = [f"{number} " for number in range(300)]
    script.pieces["go"] = [("node-0" if at < 150 else "node-1", text) for at, text in enumerate(numbers)]
    script.step_s = 0.02
    page = await entered(browser, console.link)
    await ask(page, "go")
    await page.until("document.querySelector('.answer .body').innerText.includes('30')")
    await page.offline(True)
    await page.until("document.getElementById('connection').textContent.includes('not reachable')")
    seen = await text_of(page, console)
    await asyncio.sleep(2)
    assert await text_of(page, console) == seen, "nothing comes"
    assert await page.see("document.querySelectorAll('.answer').length") == 1, "what is there stays"
    await page.offline(False)
    await page.until("document.getElementById('connection').textContent == 'connected'")
    await page.until(ENDED)
    assert words(await text_of(page, console)) == words("".join(numbers))
    assert await nodes_of(page) == ["node-0", "node-1, 212 ms"]
    assert (len(script.asked), script.attached) == (1, [])


async def test_twenty_tabs_show_one_answer_of_a_node_that_is_killed(
    browser: Chromium, real_console: ConsoleProcess, cluster: LocalCluster
) -> None:
    first = await entered(browser, real_console.link)
    await set_long(first)
    found = asyncio.create_task(serving(cluster))
    await ask(first, QUESTION)
    _, victim = await found
    await first.until("location.hash.startsWith('#s/')")
    place = await first.see("location.hash")
    pages = [first, *[await browser.page() for _ in range(19)]]
    cluster.kill(victim)
    for page in pages[1:]:
        await page.go(real_console.url + place)
    texts, chips = set(), set()
    for page in pages:
        await page.until(ENDED, 60)
        texts.add(tuple(words(await text_of(page, real_console))))
        chips.add(tuple(await nodes_of(page)))
        await assert_calm(page, real_console)
    cluster.restart(victim)
    cluster.wait_nodes(3)
    assert texts == {tuple(words(await undisturbed(cluster, QUESTION, max_tokens=500)))}
    assert len(chips) == 1
    assert chips.pop()[0] == victim
