"""The page of the cluster in a real Chromium."""

from __future__ import annotations

import pytest
from tests.console.browser.browsing import assert_calm, entered
from tests.console.browser.chromium import Chromium
from tests.console.conftest import ConsoleProcess

from ryzanstein.cli.processes.cluster import LocalCluster

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
