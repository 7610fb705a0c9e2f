"""The page of the cluster in a real Chromium."""

from __future__ import annotations

import pytest
from tests.console.browser.browsing import ENDED, QUESTION, ask, assert_calm, entered, picture, set_long

from ryzanstein.cli.processes.cluster import LocalCluster
from ryzanstein.lab.pages.chromium import Chromium
from ryzanstein.lab.pages.console_process import ConsoleProcess

pytestmark = [pytest.mark.lab, pytest.mark.cluster, pytest.mark.timeout(300)]


async def test_the_page_of_the_cluster_shows_nodes_ranks_and_what_is_wrong(
    browser: Chromium, real_console: ConsoleProcess, cluster: LocalCluster
) -> None:
    page = await entered(browser, real_console.link)
    await page.see("location.hash = '#cluster'")
    await page.until("document.querySelectorAll('#nodes tbody tr').length == 3")
    assert await page.see("document.querySelectorAll('#ranks tbody tr').length") == 3
    cluster.kill("orchestrator")
    await page.until("document.getElementById('problems').innerText.includes('orchestrator does not answer')")
    cluster.restart("orchestrator")
    await page.until("document.getElementById('problems').innerText == 'none'", 60)
    await assert_calm(page, real_console)


async def test_the_charts_begin_where_somebody_last_looked(
    browser: Chromium, real_console: ConsoleProcess, cluster: LocalCluster
) -> None:
    page = await entered(browser, real_console.link)
    await set_long(page, 400)
    await page.see("location.hash = '#cluster'")
    await page.until("document.querySelectorAll('#charts .chart').length == 4")
    await page.see("location.hash = '#chat'")
    await page.until("!document.getElementById('chat').hidden")
    await page.see("document.getElementById('question').focus()")
    await ask(page, QUESTION)
    await page.until(ENDED)
    await page.see("location.hash = '#cluster'")
    made = (
        "[...document.querySelectorAll('#charts .chart')].map((each) => each.querySelector('svg').getAttribute('aria-label'))"
    )
    await page.until(f"/most [1-9]/.test({made}[0]) && /half within: .*most [1-9]/.test({made}[1])")
    tokens, _, queue, kv = await page.see(made)
    assert tokens.startswith("Tokens, a second, by node. ")
    assert all(f"{name}: " in tokens and f"{name}: " in kv for name in cluster.node_ids)
    assert "running: " in queue
    names = await page.see(
        "[...document.querySelectorAll('#charts .chart')[0].querySelectorAll('.legend li')].map((li) => li.textContent)"
    )
    assert [each.split()[0] for each in names] == cluster.node_ids
    heads = await page.see("[...document.querySelectorAll('#nodes th')].map((each) => each.textContent)")
    assert {"tokens/s", "waiting", "KV blocks", "hot pages", "pages sealed"} <= set(heads)
    await picture(page, "console-cluster.png")
    await assert_calm(page, real_console)
