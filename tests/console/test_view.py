"""The sheet of an answer: whatever a tab missed, it has all of it in the end, once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.client import Answer, ClientError, Ended, Move, Moved, Started, Text
from ryzanstein.console.answers.markdown import safe
from ryzanstein.console.answers.view import FRAME_BYTES, MOST_TAIL, Sheet, blocks_of
from ryzanstein.console.wire import written
from ryzanstein.errors import Code
from ryzanstein.v1 import inference_pb2 as pb


class FakeTab:
    """What the page does with frames, as text."""

    def __init__(self) -> None:
        self.version = 0
        self.blocks: list[str] = []
        self.open = self.tail = ""
        self.parts: list[Any] = []
        self.status = ""

    def look(self, sheet: Sheet) -> None:
        more = True
        while more and (frame := sheet.frame(self.version)) is not None:
            got = msgspec.json.decode(written(frame))
            assert got["version"] > self.version
            self.version, self.status, more = got["version"], got["status"], got.get("more", False)
            if blocks := got.get("blocks", []):
                self.open = self.tail = ""
            self.blocks += [_text(tree) for _, tree in blocks]
            if "open" in got:
                self.open, self.tail = _text(got["open"][1]), ""
            self.tail += "".join(text for _, text in got.get("tail", []))
            self.parts = got.get("parts") or self.parts

    @property
    def text(self) -> str:
        return "".join("".join([*self.blocks, self.open, self.tail]).split())


def _text(tree: Sequence[Any]) -> str:
    return "".join(each if isinstance(each, str) else _text(each[2]) for each in tree)


def text_event(index: int, text: str, node: str = "node-0") -> Text:
    return Text(0, node, index, text, [index])


def lay_out(sheet: Sheet, watched: bool = True) -> None:
    while (job := sheet.layout(watched=watched)) is not None:
        sheet.commit(job, job.run())


def ended(sheet: Sheet) -> None:
    sheet.take(Ended(0, "stop", pb.Usage()))
    sheet.end(Answer(0.0))


words = st.text("abc \n", max_size=40)


@given(st.lists(st.tuples(words, st.integers(0, 2), st.booleans(), st.booleans()), max_size=30))
def test_a_tab_that_looks_now_and_then_has_all_of_the_text_and_all_parts(steps: list[tuple[str, int, bool, bool]]) -> None:
    sheet, often, late = Sheet("a"), FakeTab(), FakeTab()
    sheet.take(Started("g", "m", "node-0", 3))
    for index, (text, node, looks, lays_out) in enumerate(steps):
        sheet.take(text_event(index, text, f"node-{node}"))
        if lays_out:
            job = sheet.layout(watched=looks)
            if job is not None:
                sheet.take(text_event(index, "z", f"node-{node}"))  # while it is laid out
                sheet.commit(job, job.run())
        if looks:
            often.look(sheet)
    ended(sheet)
    lay_out(sheet)
    often.look(sheet)
    late.look(sheet)
    assert often.text == late.text
    assert often.blocks == late.blocks
    assert often.parts == late.parts
    nodes = [f"node-{node}" for _, node, _, _ in steps]
    assert [part["node"] for part in often.parts] == [node for at, node in enumerate(nodes) if at == 0 or nodes[at - 1] != node]
    assert (often.status, sheet.frame(often.version)) == ("complete", None)


def test_text_that_is_not_laid_out_yet_is_there_at_once() -> None:
    sheet, tab = Sheet("a"), FakeTab()
    sheet.take(text_event(0, "one "))
    lay_out(sheet)
    sheet.take(text_event(1, "two"))
    tab.look(sheet)
    assert tab.open + tab.tail == "one two"
    sheet.take(text_event(2, " three\n\nfour"))
    tab.look(sheet)
    assert tab.open + tab.tail == "one two three\n\nfour"
    lay_out(sheet)
    tab.look(sheet)
    assert (tab.blocks, tab.open, tab.tail) == (["one two three"], "four", "")


def test_a_move_is_a_part_with_its_silence_and_cause() -> None:
    sheet = Sheet("a")
    sheet.take(text_event(0, "one "))
    sheet.take(Moved(Move(0, "node-0", "node-1", 1, 0.2121, "link_lost")))
    sheet.take(text_event(1, "two", "node-1"))
    ended(sheet)
    lay_out(sheet)
    frame = sheet.frame(0)
    assert frame is not None
    got = msgspec.json.decode(written(frame))
    assert got["parts"][1] == {"node": "node-1", "tokens": 1, "silence_ms": 212.1, "cause": "link_lost"}
    assert got["blocks"] == [[0, [["p", None, ["one ", ["seam", 0, []], "two"]]]]]


def test_a_frame_is_bounded_and_the_next_one_follows() -> None:
    sheet, tab = Sheet("a"), FakeTab()
    for index in range(200):
        sheet.take(text_event(index, "word " * 1000 + "\n\n"))
    ended(sheet)
    lay_out(sheet)
    frame = sheet.frame(0)
    assert frame is not None
    assert frame.more
    assert len(written(frame)) < FRAME_BYTES + 64 * 1024
    tab.look(sheet)
    assert tab.text == "word" * 200_000


def test_what_waits_for_its_layout_is_not_sent_again_and_again() -> None:
    """A model that is faster than the layout: each look costs a bounded number of bytes, and nothing is missing in the end."""
    sheet, tab, sent = Sheet("a"), FakeTab(), 0
    for index in range(200):
        sheet.take(text_event(index, "x" * 5_000, f"node-{index // 50}"))
        if index % 20 == 19:
            job = sheet.layout(watched=True)
            assert job is not None
            sheet.commit(job, job.run())
        frame = sheet.frame(tab.version)
        assert frame is not None
        sent += len(written(frame))
        assert sum(len(text) for _, text in frame.tail) <= MOST_TAIL
        tab.look(sheet)
    assert sent < 3_000_000
    ended(sheet)
    lay_out(sheet)
    tab.look(sheet)
    assert tab.text == "x" * 1_000_000
    assert [each["tokens"] for each in tab.parts] == [50, 50, 50, 50]


def test_a_line_end_that_comes_in_two_pieces_is_one() -> None:
    sheet, tab = Sheet("a"), FakeTab()
    for index, text in enumerate(("a\r", "\nb", "\r\rc")):
        sheet.take(text_event(index, text))
    tab.look(sheet)
    assert tab.tail == safe("a\r\nb\r\rc")


def test_an_error_is_said_without_what_a_page_would_obey() -> None:
    sheet = Sheet("a")
    sheet.fail(ClientError("no \x1b[31mroom\u202e", Code.UNAVAILABLE, ""))
    frame = sheet.frame(0)
    assert frame is not None
    assert (frame.status, frame.note) == ("failed", "no [31mroom")


def test_an_answer_knows_the_text_that_the_cluster_keeps_of_it() -> None:
    sheet = Sheet("a")
    for index, text in enumerate(("a\r\n", "\ufdd0b")):
        sheet.take(text_event(index, text))
    assert sheet.says("a\r\n\ufdd0b")
    assert not sheet.says("a")


@pytest.mark.parametrize("reason", ["stop", "length", "cancelled", "tool_calls"])
def test_the_end_has_a_name(reason: str) -> None:
    sheet = Sheet("a")
    sheet.take(Ended(0, reason, pb.Usage()))
    sheet.end(Answer(0.0))
    assert sheet.over
    assert sheet.status == {"length": "length", "cancelled": "stopped"}.get(reason, "complete")


@given(st.text("ab*`\n -1.", max_size=300))
def test_an_earlier_answer_has_all_of_its_text(text: str) -> None:
    blocks = [msgspec.json.decode(block) for some in blocks_of(text * 20) for block in some]
    assert {part for part, _ in blocks} <= {-1}
    shown = "".join("".join(_text(tree) for _, tree in blocks).split())
    assert [each for each in shown if each in "ab"] == [each for each in text * 20 if each in "ab"] or "`" in text
