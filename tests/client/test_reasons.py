"""Every reason of the errors' page has its action."""

from __future__ import annotations

import re
from pathlib import Path

from ryzanstein.client.following.reasons import REASONS, Action, rule_of
from ryzanstein.errors import Code, RyzansteinError, all_drain, no_nodes

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "errors.md").read_text()
CLIENTS = PAGE[: PAGE.index("## Between our services")]


def test_every_reason_that_a_client_can_see_has_an_action() -> None:
    rows = [line.split("|") for line in CLIENTS.splitlines() if line.startswith("| ") and line.count("|") >= 5]
    named = {reason for row in rows for reason in re.findall(r"`([A-Z][A-Z_]{3,})`", row[4])}
    assert len(named) > 40
    assert named - set(REASONS) == set()


def test_no_action_is_for_a_reason_that_does_not_exist() -> None:
    assert {reason for reason in REASONS if f"`{reason}`" not in PAGE} == set()


def test_a_cluster_that_is_drained_is_not_waited_for() -> None:
    assert rule_of(no_nodes("m", "none is linked")).begin is Action.NEXT
    assert rule_of(all_drain("m", ["node-0"])).begin is Action.RAISE


def test_what_is_not_known_goes_by_its_code_and_its_time() -> None:
    assert rule_of(RyzansteinError("", Code.UNAVAILABLE, "LATER")).begin is Action.RAISE
    assert rule_of(RyzansteinError("", Code.UNAVAILABLE, "LATER", retry_after_s=1.0)).begin is Action.SAME
    assert rule_of(RyzansteinError("", Code.UNAVAILABLE, "")).attach is Action.NEXT
    assert rule_of(RyzansteinError("", Code.DEADLINE_EXCEEDED, "")).attach is Action.RAISE
