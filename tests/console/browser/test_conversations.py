"""Conversations in a real Chromium: login, reload, stop, keys of people."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.console.browser.browsing import (
    ENDED,
    STORES,
    ask,
    assert_calm,
    entered,
    nodes_of,
    set_long,
    text_of,
    undisturbed,
    words,
)

from ryzanstein.cli.processes.cluster import LocalCluster
from ryzanstein.lab.pages.chromium import Chromium
from ryzanstein.lab.pages.console_process import ConsoleProcess
from ryzanstein.lab.pages.scripted_router import Script, ScriptedRouter

pytestmark = [pytest.mark.lab, pytest.mark.cluster, pytest.mark.timeout(300)]


async def test_a_conversation_and_its_login(browser: Chromium, real_console: ConsoleProcess, cluster: LocalCluster) -> None:
    page = await entered(browser, real_console.link)
    assert await page.see("location.href") == real_console.url, "the token stays in the address bar"
    await set_long(page)
    await ask(page, "Count from 1 to 20.")
    await page.until(ENDED)
    assert words(await text_of(page, real_console)) == words(await undisturbed(cluster, "Count from 1 to 20.", max_tokens=500))
    assert len(await nodes_of(page)) == 1
    assert await page.see("document.cookie") == ""
    await ask(page, "And again?")
    await page.until("document.querySelectorAll('.answer').length == 2")
    await page.until(ENDED)
    await page.until("document.querySelectorAll('#session-list li').length >= 1")
    again = await browser.page()
    await again.go(real_console.link)
    assert "was used" not in await again.see("document.body.innerText"), "the cookie of the first tab counts"
    await assert_calm(page, real_console)


async def test_a_reload_and_a_second_tab_in_the_middle_of_an_answer(
    browser: Chromium, console: ConsoleProcess, script: Script
) -> None:
    numbers = [f"{number} " for number in range(500)]
    script.pieces["go"] = [("node-0" if at < 300 else "node-1", text) for at, text in enumerate(numbers)]
    script.step_s = 0.02
    page = await entered(browser, console.link)
    await ask(page, "go")
    await page.until("document.querySelector('.answer .body').innerText.includes('30')")
    await page.reload()
    other = await entered(browser, console.url + await page.see("location.hash"))
    for each in (page, other):
        await each.until("document.querySelector('.answer.streaming .body')?.innerText.includes('50')")
    for each in (page, other):
        await each.until(ENDED)
        assert words(await text_of(each, console)) == words("".join(numbers))
        assert await nodes_of(each) == ["node-0", "node-1, 212 ms"]
        await assert_calm(each, console)
    await page.see("document.getElementById('retry').click()")
    await page.until("document.querySelectorAll('.answer.streaming').length")
    assert len(script.asked) == 2


async def test_it_is_stopped_when_the_cluster_has_confirmed_it(
    browser: Chromium, console: ConsoleProcess, script: Script
) -> None:
    script.pieces["go"] = [("node-0", f"{number} ") for number in range(1000)]
    script.step_s = 0.02
    page = await entered(browser, console.link)
    await ask(page, "go")
    await page.until("document.querySelector('.answer .body').innerText.includes('10')")
    await page.press("Escape")
    await page.until(ENDED)
    assert (await page.see("document.querySelector('.answer .foot').innerText")).startswith("stopped")
    assert len(script.cancelled) == 1


async def test_a_closed_tab_ends_nothing(browser: Chromium, console: ConsoleProcess, script: Script) -> None:
    numbers = [f"{number} " for number in range(100)]
    script.pieces["go"] = [("node-0", text) for text in numbers]
    script.step_s = 0.02
    page = await entered(browser, console.link)
    await ask(page, "go")
    await page.until("document.querySelector('.answer .body').innerText.includes('10')")
    session = await page.see("location.hash")
    await page.go("about:blank")
    await asyncio.sleep(2.5)
    await page.go(console.url + session)
    await page.until(ENDED)
    assert words(await text_of(page, console)) == words("".join(numbers))
    assert (len(script.asked), script.cancelled) == (1, set())


async def test_where_each_person_has_a_key_it_is_entered_once_and_is_nowhere_in_the_page(
    browser: Chromium, router: ScriptedRouter, script: Script, start_console: Callable[..., ConsoleProcess]
) -> None:
    probe = start_console(router.address)
    port = probe.port
    probe.stop()
    flags = ("--behind-proxy", "--public-url", f"http://127.0.0.1:{port}/", "--port", str(port))
    console = start_console(router.address, *flags)
    page = await browser.page()
    await page.go(console.url)
    await page.until("!document.getElementById('login-form').hidden")
    for key, result in (("wrong", "does not take this key"), ("sk-person-1", "")):
        await page.until("document.activeElement.id == 'key'")
        await page.type(key)
        await page.press("Enter")
        if result:
            await page.until(f"document.getElementById('login-why').textContent.includes({result!r})")
    await page.until("document.getElementById('connection').textContent == 'connected'")
    await ask(page, "hello there")
    await page.until(ENDED)
    assert script.keys[-1] == "Bearer sk-person-1"
    everything = await page.see(f"document.documentElement.outerHTML + {STORES}")
    assert "sk-person-1" not in everything
    assert "sk-person-1" not in console.log.read_text()
