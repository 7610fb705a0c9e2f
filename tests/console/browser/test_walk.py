"""From nothing to a chat in the browser: the first commands of docs/start/console.md, in a fresh clone and environment."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tests.console.browser.browsing import ENDED, LAST, ask, assert_calm_at, entered

from ryzanstein.lab.pages.chromium import Chromium

pytestmark = [pytest.mark.lab, pytest.mark.cluster, pytest.mark.timeout(2400)]

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/start/console.md").read_text()
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^    (.*)$", PAGE, re.MULTILINE)[:2]
START_S = 2000


def link_of(walk: subprocess.Popen[str], told: Path) -> str:
    """Waits, bounded, for the link that is printed last."""
    deadline = time.monotonic() + START_S
    while not (links := re.findall(r"http://127\.0\.0\.1:\d+/#t=\S+", told.read_text())):
        assert walk.poll() is None, told.read_text()[-3000:]
        assert "no console" not in told.read_text(), told.read_text()[-3000:]
        assert time.monotonic() < deadline, told.read_text()[-3000:]
        time.sleep(0.5)
    assert told.read_text().rstrip().endswith(links[-1])
    return links[-1]


async def test_the_first_commands_of_the_page_end_in_a_chat(browser: Chromium, tmp_path: Path) -> None:
    clone, up = COMMANDS
    assert (clone, up) == ("git clone REPOSITORY ryzanstein && cd ryzanstein", "make up")
    assert "`make up`" in README, "the README says the same"
    script = f"{clone.replace('REPOSITORY', str(ROOT))}\nexec {up}"
    told = tmp_path / "told"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RYZANSTEIN_", "VIRTUAL_ENV"))}
    environment |= {"XDG_STATE_HOME": str(tmp_path / "state"), "COLUMNS": "200"}
    with told.open("w") as log:
        walk = subprocess.Popen(  # noqa: ASYNC220 (a person's shell)
            ["bash", "-ec", script], cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        link = await asyncio.to_thread(link_of, walk, told)
        page = await entered(browser, link)
        await ask(page, "Count from 1 to 20.")
        await page.until(ENDED, 60)
        assert "18 19 20" in await page.see(f"{LAST}.innerText")
        await page.see("location.hash = '#cluster'")
        await page.until("document.querySelectorAll('#nodes tbody tr').length == 2", 60)
        await assert_calm_at(page, link.partition("#")[0])
        os.killpg(walk.pid, signal.SIGINT)
        assert await asyncio.to_thread(walk.wait, 60) in (0, 130, -signal.SIGINT), "make ends as its command does"
        assert "stopped; no process is left" in told.read_text()
    finally:
        if walk.poll() is None:
            os.killpg(walk.pid, signal.SIGKILL)
            walk.wait()
