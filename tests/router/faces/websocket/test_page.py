"""docs/build/websocket.md and the code agree: close codes, bounds and messages."""

from __future__ import annotations

import re
from pathlib import Path

from tests.router.faces.websocket.test_asyncapi import CLIENT, SERVER

from ryzanstein.router.faces.websocket.limits import CloseCode, SocketLimits

PAGE = (Path(__file__).parents[4] / "docs" / "build" / "websocket.md").read_text()


def test_each_close_code_is_in_the_table_and_no_other():
    rows = re.findall(r"^\| ([\d, ]+) \|", PAGE, flags=re.MULTILINE)
    listed = {int(code) for row in rows for code in row.split(",")}
    assert listed - {1000, 1001, 1005} == set(CloseCode)


def test_the_tables_of_messages_are_complete():
    first_cells = set(re.findall(r"^\| `(\w+)` \|", PAGE, flags=re.MULTILINE))
    assert first_cells == CLIENT.keys() | SERVER.keys()


def test_the_bounds_are_the_defaults():
    limits = SocketLimits()
    numbers = {int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\d|\d", PAGE)}
    named = (limits.max_sockets, limits.max_streams, limits.max_fragments, limits.frames_per_s, limits.frame_burst)
    timed = (limits.message_timeout_s, limits.ping_s, limits.silence_s, limits.idle_s, limits.give_up_s, limits.unread_s)
    assert {int(value) for value in (*named, *timed, limits.max_mistakes)} <= numbers
